"""Attention over rows of different lengths, joined end to end: no padding, no T x T scores.

Shapes: T query tokens, S key tokens, h query heads, g key and value heads (h a multiple of g), d head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from landfall.sft.model.rotary import Angles, rotate


@dataclass
class Rows(PackedSeqParams):
    """Where the rows of a micro batch begin and end, for every layer.

    megatron-core hands it to the core attention by reference, also when it recomputes a layer, so the lengths
    stay on the host and no layer waits for the device to learn them.
    """

    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    """As the query lengths, or longer where the row began in an earlier context-parallel rank's tokens."""
    first_key: int = 0
    """Where the first row begins, among the tokens of all context-parallel ranks."""
    angles: Angles | None = None

    @classmethod
    def of(
        cls,
        query_lengths: tuple[int, ...],
        device: torch.device,
        *,
        key_lengths: tuple[int, ...] | None = None,
        first_key: int = 0,
        angles: Angles | None = None,
    ) -> Rows:
        key_lengths = query_lengths if key_lengths is None else key_lengths
        return cls(
            qkv_format="rows",
            cu_seqlens_q=_boundaries(query_lengths, device),
            cu_seqlens_kv=_boundaries(key_lengths, device),
            max_seqlen_q=max(query_lengths),
            max_seqlen_kv=max(key_lengths),
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            first_key=first_key,
            angles=angles,
        )


def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


class RowAttention(MegatronModule):
    """megatron-core's core attention: rotary positions, then causal attention within each row."""

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Rows | None = None,
        **_: Any,
    ) -> Tensor:
        """``query`` [T, 1, h, d], ``key`` and ``value`` [T, 1, g, d] -> [T, 1, h * d]."""
        rows = packed_seq_params
        assert rows is not None and rows.angles is not None
        query, key = rotate(query, rows.angles), rotate(key, rows.angles)
        if self.cp_group.size() > 1:
            key, value = self._keys_of_our_rows(key, rows), self._keys_of_our_rows(value, rows)
        attended = attend(
            query.squeeze(1), key.squeeze(1), value.squeeze(1), rows, causal=True, scale=self.softmax_scale
        )
        return attended.reshape(attended.shape[0], 1, -1)

    def _keys_of_our_rows(self, local: Tensor, rows: Rows) -> Tensor:
        everybodys = gather_from_sequence_parallel_region(
            local.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        return everybodys[rows.first_key : rows.first_key + sum(rows.key_lengths)]


def attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, causal: bool, scale: float | None
) -> Tensor:
    """``query`` [T, h, d], ``key`` and ``value`` [S, g, d] -> [T, h, d]; each row attends to itself.

    Where a row has more keys than queries, the queries are its last ones. Scores are float32 inside.
    """
    all_alike = rows.query_lengths == rows.key_lengths and len(set(rows.query_lengths)) == 1
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        if all_alike and _cudnn_takes(query):
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return _one_call(query, key, value, len(rows.query_lengths), causal, scale)
        return _flash(query, key, value, rows, causal, scale)
    if query.is_cpu and query.dtype == torch.bfloat16:  # torch's CPU kernels are many times faster in float32
        wide = attend(query.float(), key.float(), value.float(), rows, causal=causal, scale=scale)
        return wide.to(query.dtype)
    if all_alike:
        return _one_call(query, key, value, len(rows.query_lengths), causal, scale)
    return _row_by_row(query, key, value, rows, causal, scale)


def _cudnn_takes(query: Tensor) -> bool:
    """Whether cuDNN's kernel is there for rows of one length: half as fast again as flash on Hopper. (For rows of
    different lengths it plans anew at every call, and takes longer to plan than to run.)"""
    hopper = torch.cuda.get_device_capability(query.device) >= (9, 0)
    return hopper and query.shape[-1] % 8 == 0 and torch.backends.cuda.cudnn_sdp_enabled()


def _flash(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, causal: bool, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    arguments: dict[str, Any] = {} if scale is None else {"scale": scale}
    known = _parameters(varlen_attn)
    if "window_size" in known:  # since torch 2.11; causal is the window that ends at the token itself
        arguments["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        arguments["is_causal"] = causal
    if "enable_gqa" in known:
        arguments["enable_gqa"] = query.shape[1] != key.shape[1]
    attended = varlen_attn(
        query,
        key,
        value,
        rows.cu_seqlens_q,
        rows.cu_seqlens_kv,
        rows.max_seqlen_q,
        rows.max_seqlen_kv,
        **arguments,
    )
    return cast(Tensor, attended)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _one_call(
    query: Tensor, key: Tensor, value: Tensor, num_rows: int, causal: bool, scale: float | None
) -> Tensor:
    """All rows have the same length: one call for all of them."""
    by_row = (tensor.view(num_rows, -1, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value))
    attended = _scaled_dot_product(*by_row, causal=causal, scale=scale)
    return attended.transpose(1, 2).reshape(query.shape)


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, causal: bool, scale: float | None
) -> Tensor:
    attended = []
    queries, keys = accumulate(rows.query_lengths, initial=0), accumulate(rows.key_lengths, initial=0)
    for (first, last), (first_key, last_key) in zip(pairwise(queries), pairwise(keys), strict=True):
        row = (query[first:last], key[first_key:last_key], value[first_key:last_key])
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in row)
        attended.append(
            _scaled_dot_product(*heads_first, causal=causal, scale=scale).squeeze(0).transpose(0, 1)
        )
    return torch.cat(attended)


def _scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> Tensor:
    """[R, h, T, d] each, R rows of one length."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if causal and num_queries != num_keys:  # torch's is_causal would take the queries for the row's first
        causal, mask = False, _last_queries(num_queries, num_keys, query.device)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _last_queries(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return everything.tril(diagonal=num_keys - num_queries)
