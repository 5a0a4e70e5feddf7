"""One training step and one evaluation over micro batches, by megatron-core's schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from landfall.errors import LandfallError
from landfall.sft.data.batch import MicroBatch

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Mean over the labelled tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Labelled tokens of the global batch."""
    num_input_tokens: int
    """All tokens of the global batch, of text and of images."""
    skipped: bool
    """Whether the optimizer refused the gradients and left the parameters alone."""


def train_step(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    micro_batches: Sequence[MicroBatch],
) -> StepResult:
    """Train on a global batch, of which ``micro_batches`` (at least one, as many on every rank) are this
    data-parallel rank's. Every rank calls it.

    Raises LandfallError on every rank, before any parameter changes, if loss or gradients are not finite.
    """
    if not model.training:
        model.train()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = _run(model, micro_batches, forward_only=False)
    total = _over_all_ranks(model, reports, micro_batches)
    loss = _finite("loss", total.loss_sum / max(total.num_tokens, 1))
    updated, grad_norm = _update(optimizer)
    if updated:
        scheduler.step(increment=total.num_rows)
    return StepResult(loss, grad_norm, total.num_tokens, total.num_input_tokens, not updated)


def evaluate(model: DistributedDataParallel, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
    """Sum of the losses of all labelled tokens over all data-parallel ranks, and their number.

    The ranks of one model-parallel group pass the same micro batches; others may have fewer, or none.
    """
    model.eval()
    with torch.no_grad():
        reports = _run(model, micro_batches, forward_only=True) if micro_batches else []
    model.train()
    total = _over_all_ranks(model, reports, micro_batches)
    return total.loss_sum, total.num_tokens


def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
    """megatron-core's forward step: the model's output for the next micro batch, and what the last pipeline
    stage makes of it."""
    return model(next(batches)), _sum_losses


def _sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss sum, number of tokens (megatron-core divides the gradients by it in the end), what to report."""
    total = losses.sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int)
    return total, num_tokens, {"loss_sum": total.detach().clone(), "num_tokens": num_tokens}


def _run(
    model: DistributedDataParallel, micro_batches: Sequence[MicroBatch], forward_only: bool
) -> list[dict[str, Tensor]]:
    """What :func:`_sum_losses` reported for each micro batch; nothing except on the last pipeline stage."""
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].num_tokens,  # in name only: every micro batch has its own
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _update(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """megatron-core's ``optimizer.step()``, with a look at the norm before it is too late. Whether parameters
    were updated, and the norm before clipping."""
    if optimizer.prepare_grads():
        return False, math.inf
    grad_norm = _finite("gradient norm", float(optimizer.get_grad_norm()))
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)
    return bool(optimizer.step_with_ready_grads()), grad_norm


def _finite(name: str, value: float) -> float:
    if math.isfinite(value):
        return value
    raise LandfallError(
        f"training diverged: the {name} is {value}",
        expected="a finite number",
        do="go on from the last checkpoint with a lower learning rate, and look for broken rows",
    )


class _Total(NamedTuple):
    loss_sum: float
    num_tokens: int
    num_rows: int
    num_input_tokens: int


def _over_all_ranks(
    model: torch.nn.Module, reports: Sequence[dict[str, Tensor]], micro_batches: Sequence[MicroBatch]
) -> _Total:
    """Sum over data-parallel ranks, known to all pipeline stages; the one wait for the device in a step."""
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    if reports:
        sums[0] = torch.stack([report["loss_sum"] for report in reports]).double().sum()
    sums[1] = sum(int(report["num_tokens"]) for report in reports)
    sums[2] = sum(batch.num_rows for batch in micro_batches)
    sums[3] = sum(batch.num_tokens for batch in micro_batches)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
    loss_sum, num_tokens, num_rows, num_input_tokens = sums.tolist()
    copies = (
        parallel_state.get_context_parallel_world_size()
    )  # of each micro batch, a part of it trained in each
    return _Total(loss_sum, round(num_tokens), round(num_rows) // copies, round(num_input_tokens) // copies)
