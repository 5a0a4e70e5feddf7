from __future__ import annotations

import pytest
import torch
from torch import Tensor

from landfall.sft.model.attention import Rows, attend
from tests.sft.model.peak import peak_bytes

CPU = torch.device("cpu")


def heads(num_tokens: int, num_keys: int, query_heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, query_heads, 16), (num_keys, key_heads, 16), (num_keys, key_heads, 16)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def by_definition(query: Tensor, key: Tensor, value: Tensor, rows: Rows, causal: bool) -> Tensor:
    """Softmax over the scores, with everything that may not be seen masked out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    row_of_query = torch.repeat_interleave(torch.tensor(rows.query_lengths))
    row_of_key = torch.repeat_interleave(torch.tensor(rows.key_lengths))
    seen = row_of_query[:, None] == row_of_key[None]
    if causal:
        end_of_query, end_of_key = from_row_end(rows.query_lengths), from_row_end(rows.key_lengths)
        seen &= end_of_query[:, None] <= end_of_key[None]
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def from_row_end(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length).flip(0) for length in lengths])


ROWS = {
    "one": ((9,), (9,)),
    "equal": ((5, 5, 5), (5, 5, 5)),
    "different": ((3, 8, 1, 5), (3, 8, 1, 5)),
    "begun elsewhere": ((3, 4), (7, 4)),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("case", ROWS)
def test_attention_equals_its_definition(case: str, key_heads: int, causal: bool) -> None:
    query_lengths, key_lengths = ROWS[case]
    rows = Rows.of(query_lengths, CPU, key_lengths=key_lengths)
    inputs = heads(sum(query_lengths), sum(key_lengths), key_heads=key_heads)
    ours = attend(*inputs, rows, causal=causal, scale=None)
    expected = by_definition(*inputs, rows, causal)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for mine, wanted in zip(
        torch.autograd.grad(ours, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_row_boundaries_are_what_the_device_needs() -> None:
    rows = Rows.of((3, 8, 1), CPU, key_lengths=(5, 8, 1))
    assert rows.cu_seqlens_q.tolist() == [0, 3, 11, 12] and rows.cu_seqlens_q.dtype == torch.int32
    assert rows.cu_seqlens_kv.tolist() == [0, 5, 13, 14]
    assert (rows.max_seqlen_q, rows.max_seqlen_kv) == (8, 8)


@pytest.mark.parametrize("lengths", [(64,) * 32, (32, 96) * 16], ids=["equal", "different"])
def test_attention_never_scores_all_tokens_against_all(lengths: tuple[int, ...]) -> None:
    num_tokens = sum(lengths)
    inputs, rows = heads(num_tokens, num_tokens), Rows.of(lengths, CPU)
    peak = peak_bytes(lambda: attend(*inputs, rows, causal=True, scale=None).sum().backward())
    assert peak < 4 * num_tokens * num_tokens / 2
