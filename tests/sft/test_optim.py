from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from landfall.errors import UsageError
from landfall.sft.model.freeze import part_of
from landfall.sft.model.step import train_step
from landfall.sft.optim import (
    Adam,
    OptimizerOptions,
    allocate_state,
    build_optimizer,
    install_optimizer,
    wrap_ddp,
)
from tests.sft.model import tiny
from tests.sft.model.training import OPTIMIZER

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    tiny.join()
    yield
    tiny.leave()


def two_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]


def give_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_adam_steps_as_torchs() -> None:
    ours, theirs = two_parameters(), two_parameters()
    adam, reference = Adam(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        adam.step()
        reference.step()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


def test_adam_without_decoupling_steps_as_torchs_adam() -> None:
    ours, theirs = two_parameters(), two_parameters()
    adam, reference = Adam(ours, **SETTINGS, adam_w_mode=False), torch.optim.Adam(theirs, **SETTINGS)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        adam.step()
        reference.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_step_counts_once_in_the_group() -> None:
    parameters = two_parameters()
    adam = Adam(parameters, **SETTINGS)
    for step in range(3):
        give_gradients(parameters, step)
        adam.step()
    assert adam.param_groups[0]["step"] == 3
    assert set(adam.state[parameters[0]]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.case("b16")
def test_parameter_that_got_no_gradient_is_left_alone_and_learns_after_a_resume() -> None:
    first, late = two_parameters()
    untouched = late.detach().clone()
    adam = Adam([first, late], **SETTINGS)
    give_gradients([first], 0)
    adam.step()
    assert torch.equal(late, untouched) and late not in adam.state

    again = [torch.nn.Parameter(first.detach().clone()), torch.nn.Parameter(late.detach().clone())]
    resumed = Adam(again, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(adam.state_dict()))
    for parameters, optimizer in (([first, late], adam), (again, resumed)):
        give_gradients(parameters, 1)
        optimizer.step()
    assert torch.equal(first, again[0]) and torch.equal(late, again[1])
    assert not torch.equal(late, untouched)


@pytest.mark.case("b16")
def test_vision_tower_has_its_state_before_the_first_image() -> None:
    wrapped, optimizer, scheduler = training(OPTIMIZER)
    train_step(wrapped, optimizer, scheduler, [tiny.joined("text", "text")])
    inner = optimizer.chained_optimizers[0].optimizer
    states = [set(inner.state[p]) for group in inner.param_groups for p in group["params"]]
    assert states and all(state == {"exp_avg", "exp_avg_sq"} for state in states)
    assert {group["step"] for group in inner.param_groups} == {1}
    assert len(states) == len(list(wrapped.parameters()))


def training(options: OptimizerOptions, bf16: bool = False):  # type: ignore[no-untyped-def]
    model = tiny.make(tiny.reference(tiny.config()), tiny.ModelOptions(bf16=bf16))
    wrapped = wrap_ddp(model, replace(options, bf16=bf16))
    return wrapped, *build_optimizer(wrapped, replace(options, bf16=bf16))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_every_kind_of_megatron_optimizer_uses_our_adam_and_learns(distributed: bool, bf16: bool) -> None:
    options = replace(OPTIMIZER, use_distributed_optimizer=distributed, lr_warmup_iters=0)
    wrapped, optimizer, scheduler = training(options, bf16)
    [part] = optimizer.chained_optimizers
    assert isinstance(part.optimizer, Adam) and isinstance(part, DistributedOptimizer) == distributed
    batch = tiny.joined("image", "text", "images")
    losses = [train_step(wrapped, optimizer, scheduler, [batch]).loss for _ in range(6)]
    assert losses[-1] < losses[0] * 0.9
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert {p.dtype for p in wrapped.parameters()} == {dtype}
    assert {p.main_grad.dtype for p in wrapped.parameters()} == {torch.float32}


def test_install_again_changes_nothing() -> None:
    from megatron.core import optimizer

    install_optimizer()
    before = dict(vars(optimizer))
    install_optimizer()
    assert vars(optimizer) == before and optimizer.Adam is Adam


def rates(options: OptimizerOptions, num_steps: int) -> list[float]:
    _, optimizer, scheduler = training(options)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=options.global_batch_size)
    return found


def test_rate_warms_up_then_falls_as_a_cosine() -> None:
    options = OptimizerOptions(
        lr=1.0, min_lr=0.1, train_iters=10, global_batch_size=8, lr_warmup_fraction=0.2
    )
    found = rates(options, 12)
    assert found[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert found[6] == pytest.approx(0.55) and found[10:] == pytest.approx([0.1, 0.1])
    assert found[2:] == sorted(found[2:], reverse=True)
    by_iterations = replace(options, lr_warmup_fraction=None, lr_warmup_iters=2)
    assert rates(by_iterations, 12) == pytest.approx(found)


def test_parts_have_their_own_rates_and_biases_do_not_decay() -> None:
    options = OptimizerOptions(
        lr=1e-3, min_lr=1e-4, train_iters=10, global_batch_size=8, vit_lr=1e-4, aligner_lr=5e-4
    )
    wrapped, optimizer, _ = training(replace(options, use_distributed_optimizer=False))
    names = {parameter: name.removeprefix("module.") for name, parameter in wrapped.named_parameters()}
    expected = {"llm": (1e-3, 1e-4), "vit": (1e-4, 1e-5), "aligner": (5e-4, 5e-5)}
    found = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = part_of(names[parameter])
            assert (group["max_lr"], group["min_lr"]) == pytest.approx(expected[part])
            assert (group["wd_mult"] == 0.0) == (parameter.dim() == 1)
            found.add(part)
    assert found == set(expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lr_warmup_fraction": 1.0}, "warming up"),
        ({"lr_warmup_iters": 30}, "warming up"),
        ({"min_lr": 1.0}, "min_lr"),
    ],
)
def test_schedule_that_cannot_be_is_refused(change: dict[str, float], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        training(replace(OPTIMIZER, **change))


def test_state_allocated_at_start_is_what_the_first_step_would_make() -> None:
    after_a_step = []
    for early in (False, True):
        wrapped, optimizer, scheduler = training(replace(OPTIMIZER, lr_warmup_iters=0))
        if early:
            allocate_state(optimizer)
            inner = optimizer.chained_optimizers[0].optimizer
            assert len(inner.state) == len(list(wrapped.parameters()))
        train_step(wrapped, optimizer, scheduler, [tiny.joined("image", "text")])
        after_a_step.append([parameter.detach().clone() for parameter in wrapped.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*after_a_step, strict=True))
