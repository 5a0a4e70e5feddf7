"""From final hidden states to the loss of each token.

Shapes: N labelled tokens, H hidden size, v vocabulary rows on this tensor-parallel rank (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = 256 << 20
"""How many bytes of float32 logits the fused loss makes at a time."""


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows of one tensor-parallel rank."""

    first: int
    """Token id of the rank's first row."""
    num_tokens: int
    """Rows that are tokens; the rest is padding, which no probability may go to."""
    group: dist.ProcessGroup
    """The ranks that hold the other rows."""


def plain_losses(hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    """``hidden`` [N, H], ``weight`` [v, H], ``labels`` [N] -> [N] float32, by way of all logits at once."""
    return vocab_parallel_cross_entropy(_logits(hidden, weight, shard), labels)


def fused_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """As :func:`plain_losses`, but at most ``chunk_bytes`` of logits exist at a time; the way back makes
    them once more."""
    chunk = max(1, chunk_bytes // (4 * weight.shape[0]))
    return _FusedLosses.apply(hidden, weight, labels, shard, chunk)


def _logits(hidden: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """[N, v] float32; minus infinity at padding rows."""
    logits = linear(hidden, weight).float()
    if shard.num_tokens < weight.shape[0]:
        logits[:, shard.num_tokens :] = float("-inf")
    return logits


class _FusedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, chunk: int
    ) -> Tensor:
        chosen = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        log_sum = torch.empty_like(chosen)
        for part in _parts(len(labels), chunk):
            logits = _logits(hidden[part], weight, shard)
            log_sum[part] = _log_sum_exp(logits, shard)
            chosen[part] = _logits_of(logits, labels[part], shard)
        ctx.save_for_backward(hidden, labels, log_sum)
        ctx.weight, ctx.shard, ctx.chunk = weight, shard, chunk
        return log_sum - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, labels, log_sum = ctx.saved_tensors
        weight, shard = ctx.weight, ctx.shard
        of_weight = _WeightGradient(weight) if ctx.needs_input_grad[1] else None
        of_hidden = torch.empty_like(hidden)
        for part in _parts(len(labels), ctx.chunk):
            of_logits = _logits(hidden[part], weight, shard).sub_(log_sum[part, None]).exp_()
            ours, rows = _ours(labels[part], shard)
            of_logits.scatter_add_(1, rows[:, None], -ours[:, None].float())
            of_logits = of_logits.mul_(gradients[0][part, None]).to(hidden.dtype)
            torch.mm(of_logits, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight.add(of_logits, hidden[part])
        return of_hidden, None if of_weight is None else of_weight.result(), None, None, None


def _parts(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _log_sum_exp(logits: Tensor, shard: VocabShard) -> Tensor:
    if shard.group.size() == 1:
        return logits.logsumexp(-1)
    largest = logits.amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    total = (logits - largest[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=shard.group)
    return largest + total.log()


def _logits_of(logits: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    ours, rows = _ours(labels, shard)
    chosen = logits.gather(1, rows[:, None]).squeeze(1).masked_fill_(~ours, 0.0)
    if shard.group.size() > 1:
        dist.all_reduce(chosen, group=shard.group)
    return chosen


def _ours(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Which labels are rows of this rank, and their rows (0 for those that are not)."""
    rows = labels - shard.first
    ours = (rows >= 0) & (rows < shard.num_tokens)
    return ours, rows.where(ours, 0)


class _WeightGradient:
    """Sums the parts of the output weight's gradient in float32: in the optimizer's own buffer if the weight
    has one (megatron-core's DDP gives it), so that a vocabulary's worth of memory is not taken twice."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        buffer: Tensor | None = getattr(weight, "main_grad", None)
        self._in_place = buffer is not None
        self._sum = torch.zeros_like(weight, dtype=torch.float32) if buffer is None else buffer

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        if self._sum.dtype == hidden.dtype:
            self._sum.addmm_(of_logits.t(), hidden)
        else:
            self._sum.add_(of_logits.t() @ hidden)

    def result(self) -> Tensor:
        """What autograd shall still add: nothing, where it all went into the buffer."""
        if self._in_place:
            return self._weight.new_zeros(()).expand_as(self._weight)
        return self._sum.to(self._weight.dtype)
