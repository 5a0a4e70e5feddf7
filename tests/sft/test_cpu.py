"""megatron-core runs without CUDA, and torch is the same for everybody else."""

from __future__ import annotations

import importlib
import sys
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

from landfall.sft import cpu
from landfall.testing.procs import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is installed")

OWNERS = (torch, torch.cuda, torch.cpu, torch.Tensor, torch.random, torch.Generator)


def changed_names() -> list[str]:
    import megatron.core.optimizer  # noqa: F401  (torch itself changes while parts of it are imported)

    before = [dict(vars(owner)) for owner in OWNERS]
    cpu.install()
    cpu.install()
    return [
        f"{owner.__name__}.{name}"
        for owner, names in zip(OWNERS, before, strict=True)
        for name, value in vars(owner).items()
        if names.get(name) is not value
    ]


def test_install_replaces_nothing_in_torch() -> None:
    assert run_ranks(changed_names, 1) == [[]]


def test_other_callers_still_get_stock_torch() -> None:
    cpu.install()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1).cuda()
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.cuda.device_count() == 0 and not torch.cuda.is_available()


def code_objects(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(found for one in inner for found in code_objects(one))]


def module_imported_later() -> tuple[bool, list[str], bool]:
    cpu.install()
    name = "megatron.core.energy_monitor"
    fresh = name not in sys.modules
    module: Any = importlib.import_module(name)
    functions = [f for c in vars(module).values() if isinstance(c, type) for f in vars(c).values()]
    codes = [o for f in functions if isinstance(f, FunctionType) for o in code_objects(f.__code__)]
    return fresh, [code.co_name for code in codes if "cuda" in code.co_names], module.torch is torch


def test_module_imported_after_install_is_retargeted_too() -> None:
    [(fresh, left, is_stock)] = run_ranks(module_imported_later, 1)
    assert fresh, "choose a module that nothing imports"
    assert not left and not is_stock


def test_strings_and_types_of_megatron_mean_the_cpu() -> None:
    cpu.install()
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import data

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=4.0)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 3)
    assert "cuda" not in data._build_key_size_numel_dictionaries.__code__.co_consts


def test_traceback_still_shows_megatrons_lines() -> None:
    cpu.install()
    from megatron.core.optimizer import clip_grads

    function = clip_grads.clip_grad_by_total_norm_fp32
    assert function.__code__.co_filename == clip_grads.__file__
    assert function.__code__.co_firstlineno > 1


def states_of_the_tracker() -> list[Any]:
    cpu.install()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.add("one", 11)
    tracker.add("two", 22)
    torch.manual_seed(5)
    drawn = []
    for name in ("one", "two", "one"):
        with tracker.fork(name):
            drawn.append(torch.rand(2).tolist())
    with tracker.fork("one"), tracker.fork("two"):
        drawn.append(torch.rand(2).tolist())
    return [*drawn, torch.rand(2).tolist()]


def test_named_random_states_are_independent_states_of_the_cpu_generator() -> None:
    one, two, one_again, nested_two, outer = run_ranks(states_of_the_tracker, 1)[0]
    torch.manual_seed(11)
    assert [one, one_again] == [torch.rand(2).tolist(), torch.rand(2).tolist()]
    torch.manual_seed(22)
    assert [two, nested_two] == [torch.rand(2).tolist(), torch.rand(2).tolist()]
    torch.manual_seed(5)
    assert outer == torch.rand(2).tolist()


def unknown_state() -> str:
    cpu.install()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with pytest.raises(KeyError, match="no-such"), get_cuda_rng_tracker().fork("no-such"):
        pass
    return "raised"


def test_unknown_random_state_is_an_error() -> None:
    assert run_ranks(unknown_state, 1) == ["raised"]
