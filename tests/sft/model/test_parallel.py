"""The same training on several ranks as on one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from landfall.testing.procs import run_ranks
from tests.sft.model.training import MIXED, OPTIMIZER, Outcome, Plan, split, train, train_as_rank

OVERLAP = replace(OPTIMIZER, overlap_grad_reduce=True, overlap_param_gather=True)


@cache
def alone(plan: Plan) -> Outcome:
    return train(plan)


def losses(outcome: Outcome) -> list[float]:
    return [step.loss for step in outcome.steps]


def assert_same_training(outcomes: list[Outcome], expected: Outcome) -> None:
    assert min(losses(expected)) < losses(expected)[0] * 0.95, "nothing was learned: an empty comparison"
    for outcome in outcomes:
        assert losses(outcome) == pytest.approx(losses(expected), abs=1e-5)
        assert [s.num_tokens for s in outcome.steps] == [s.num_tokens for s in expected.steps]
        norms = [step.grad_norm for step in outcome.steps]
        assert norms == pytest.approx([step.grad_norm for step in expected.steps], rel=1e-3)
        assert outcome.evaluation == pytest.approx(expected.evaluation, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_data_parallel_ranks_train_as_one_rank(num_ranks: int, tied: bool) -> None:
    plan = Plan(tied=tied)
    assert_same_training(run_ranks(train_as_rank, num_ranks, plan), alone(plan))


def test_overlapped_communication_trains_as_one_rank() -> None:
    plan = Plan()
    outcomes = run_ranks(train_as_rank, 2, replace(plan, optimizer=OVERLAP))
    assert_same_training(outcomes, alone(plan))


SPLITS = {
    "tp": {"tensor_model_parallel_size": 2},
    "tp+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", SPLITS)
def test_ranks_that_share_the_model_train_as_one_rank(how: str, tied: bool) -> None:
    plan = Plan(tied=tied)
    assert_same_training(run_ranks(train_as_rank, 2, split(plan, **SPLITS[how])), alone(plan))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp+sp pp", "tp+sp cp", "pp cp"])
def test_every_pair_of_splits_trains_as_one_rank(how: str) -> None:
    sizes = {name: size for part in how.split() for name, size in SPLITS[part].items()}
    plan = replace(Plan(), options=replace(Plan().options, cross_entropy_loss_fusion=True))
    assert_same_training(run_ranks(train_as_rank, 4, split(plan, **sizes)), alone(plan))


ONE_EACH = (("image",) * 4 + ("text",) * 4,)
SEVERAL_KINDS = (*ONE_EACH * 4, ("text",) * 8, ("image", "images") * 4)


@pytest.mark.case("f02")
@pytest.mark.parametrize("optimizer", [OPTIMIZER, OVERLAP], ids=["plain", "overlapped"])
def test_rank_without_images_trains_as_one_rank(optimizer: object) -> None:
    plan = Plan(num_steps=6, kinds=SEVERAL_KINDS)
    outcomes = run_ranks(train_as_rank, 2, replace(plan, optimizer=optimizer), timeout_s=60)
    assert_same_training(outcomes, alone(plan))


@pytest.mark.case("f02")
@pytest.mark.parametrize("kinds", [ONE_EACH, (("text",) * 8,)], ids=["one rank", "no rank"])
def test_vision_gradients_equal_one_ranks_where_images_are_missing(
    kinds: tuple[tuple[str, ...], ...],
) -> None:
    whole = replace(OPTIMIZER, use_distributed_optimizer=False)
    plan = Plan(num_steps=1, kinds=kinds, optimizer=whole)
    expected = alone(plan)
    for outcome in run_ranks(train_as_rank, 2, plan):
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(outcome.gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    vision = [g for name, g in expected.gradients.items() if name.startswith("visual.")]
    assert any(g.any() for g in vision) == (kinds == ONE_EACH)


def test_replicas_of_the_vision_tower_stay_equal() -> None:
    outcomes = run_ranks(train_as_rank, 2, split(Plan(kinds=MIXED), **SPLITS["tp+sp"]))
    first, second = (outcome.parameters for outcome in outcomes)
    for name, parameter in first.items():
        if name.startswith("visual.") or "norm" in name:
            torch.testing.assert_close(parameter, second[name], rtol=0, atol=1e-6, msg=name)
