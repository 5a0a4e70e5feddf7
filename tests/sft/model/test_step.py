from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from landfall.errors import LandfallError
from landfall.sft.data.batch import MicroBatch
from landfall.sft.model.step import evaluate, train_step
from landfall.sft.optim import build_optimizer, wrap_ddp
from landfall.testing.procs import run_ranks
from tests.sft.model import tiny
from tests.sft.model.training import OPTIMIZER

EAGER = replace(OPTIMIZER, lr_warmup_iters=0)


def training():  # type: ignore[no-untyped-def]
    wrapped = wrap_ddp(tiny.make(tiny.reference(tiny.config())), EAGER)
    return wrapped, *build_optimizer(wrapped, EAGER)


def batches() -> list[MicroBatch]:
    """Micro batches with different numbers of labelled tokens."""
    return [tiny.joined("image", "text", seed=1), tiny.joined("text", seed=2)]


def test_loss_is_the_mean_over_all_labelled_tokens() -> None:
    wrapped, optimizer, scheduler = training()
    losses = torch.cat([wrapped(batch) for batch in batches()]).detach()
    counts = [int((batch.labels != -100).sum()) for batch in batches()]
    assert len(set(counts)) == 2 and sum(counts) == len(losses)
    result = train_step(wrapped, optimizer, scheduler, batches())
    assert result.loss == pytest.approx(float(losses.mean()), rel=1e-6)
    assert result.num_tokens == sum(counts) and not result.skipped
    assert result.num_input_tokens == sum(batch.num_tokens for batch in batches())


def test_gradient_is_that_of_the_mean_however_the_rows_are_batched() -> None:
    norms = []
    for split in (batches(), [tiny.joined("text", seed=2), tiny.joined("image", "text", seed=1)]):
        norms.append(train_step(*training(), split).grad_norm)
    wrapped, *_ = training()
    losses = torch.cat([wrapped(batch) for batch in batches()])
    gradients = torch.autograd.grad(losses.mean(), list(wrapped.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert norms == pytest.approx([float(norm)] * 2, rel=1e-5)


def test_schedule_advances_by_the_rows_of_the_global_batch() -> None:
    wrapped, optimizer, scheduler = training()
    for _ in range(2):
        train_step(wrapped, optimizer, scheduler, batches())
    assert scheduler.num_steps == 6


def test_evaluation_changes_nothing_and_sums_over_tokens() -> None:
    wrapped, *_ = training()
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    losses = torch.cat([wrapped(batch) for batch in batches()]).detach()
    loss_sum, num_tokens = evaluate(wrapped, batches())
    assert loss_sum == pytest.approx(float(losses.sum()), rel=1e-6) and num_tokens == len(losses)
    assert wrapped.training
    assert all(torch.equal(a, b) for a, b in zip(before, wrapped.parameters(), strict=True))


def evaluate_on_rank_0_only() -> tuple[float, int]:
    tiny.join()
    wrapped, *_ = training()
    return evaluate(wrapped, batches() if torch.distributed.get_rank() == 0 else [])


def test_rank_without_rows_takes_part_in_the_evaluation() -> None:
    wrapped, *_ = training()
    expected = pytest.approx(evaluate(wrapped, batches()), rel=1e-5)
    assert run_ranks(evaluate_on_rank_0_only, 2) == [expected, expected]


def diverge(where: str) -> tuple[str, bool]:
    """Only rank 0 meets something that is not finite."""
    tiny.join()
    wrapped, optimizer, scheduler = training()
    batch = batches()[0]
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    if torch.distributed.get_rank() == 0:
        if where == "loss":
            assert batch.pixel_values is not None
            batch = replace(batch, pixel_values=batch.pixel_values * float("inf"))
        else:
            weight = wrapped.module.language_model.decoder.layers[0].mlp.linear_fc2.weight
            weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(LandfallError, match="diverged") as caught:
        train_step(wrapped, optimizer, scheduler, [batch])
    same = all(torch.equal(a, b) for a, b in zip(before, wrapped.parameters(), strict=True))
    return str(caught.value), same


@pytest.mark.parametrize(("where", "name"), [("loss", "loss is"), ("gradient", "gradient norm is")])
def test_divergence_stops_every_rank_before_a_parameter_changes(where: str, name: str) -> None:
    results = run_ranks(diverge, 2, where, timeout_s=60)
    assert all(name in message and same for message, same in results)
