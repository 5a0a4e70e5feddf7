"""A short training of the tiny model, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state

from landfall.sft.data.batch import MicroBatch, collate
from landfall.sft.model.build import ModelOptions
from landfall.sft.model.freeze import apply_freeze
from landfall.sft.model.step import StepResult, evaluate, train_step
from landfall.sft.optim import OptimizerOptions, build_optimizer, wrap_ddp
from tests.sft.model import tiny

MIXED = (
    ("image", "text", "images", "image", "text", "text", "image", "image"),
    ("text", "text", "image", "text", "image", "images", "text", "image"),
)
OPTIMIZER = OptimizerOptions(lr=3e-3, train_iters=20, global_batch_size=8, lr_warmup_iters=2, min_lr=3e-4)


@dataclass(frozen=True)
class Plan:
    """What to train. Step s takes rows of ``kinds[s % len(kinds)]``, in order over the ranks; the same kinds
    are the same rows."""

    num_steps: int = 10
    kinds: tuple[tuple[str, ...], ...] = MIXED
    micro_batch_size: int = 2
    tied: bool = False
    freeze: tuple[bool, bool, bool] = (False, False, False)
    options: ModelOptions = ModelOptions()
    optimizer: OptimizerOptions = OPTIMIZER


@dataclass(frozen=True)
class Outcome:
    steps: list[StepResult]
    evaluation: tuple[float, int]
    gradients: dict[str, torch.Tensor]
    """After the last step, summed over ranks; of this rank's parameters, without a distributed optimizer."""
    parameters: dict[str, torch.Tensor]


def train(plan: Plan) -> Outcome:
    """On every rank of a job that has started."""
    model = tiny.make(tiny.reference(tiny.config(plan.tied)), plan.options)
    apply_freeze(model, *plan.freeze)
    wrapped = wrap_ddp(model, plan.optimizer)
    optimizer, scheduler = build_optimizer(wrapped, plan.optimizer)
    steps = [
        train_step(wrapped, optimizer, scheduler, micro_batches(plan, step)) for step in range(plan.num_steps)
    ]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Outcome(
        steps,
        evaluate(wrapped, micro_batches(plan, 0)),
        {name: p.main_grad.clone() for name, p in trained.items()},
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )


def micro_batches(plan: Plan, step: int) -> list[MicroBatch]:
    """This data-parallel rank's share of a step: a contiguous part of the global batch."""
    kinds = plan.kinds[step % len(plan.kinds)]
    examples = tiny.rows(kinds, seed=plan.kinds.index(kinds))
    share = len(examples) // parallel_state.get_data_parallel_world_size()
    first = parallel_state.get_data_parallel_rank() * share
    ours = examples[first : first + share]
    size = plan.micro_batch_size
    return [collate(ours[start : start + size]) for start in range(0, len(ours), size)]


def train_as_rank(plan: Plan) -> Outcome:
    """The same on a rank that :func:`landfall.testing.procs.run_ranks` started."""
    tiny.join(plan.options)
    return train(plan)


def split(plan: Plan, **sizes: int | bool) -> Plan:
    """The plan for a job whose ranks share the model."""
    return replace(plan, options=replace(plan.options, **sizes))
