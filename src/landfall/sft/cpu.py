"""megatron-core where there is no CUDA device.

megatron-core asks for CUDA by name: ``torch.cuda.current_device()``, ``device="cuda"``, ``tensor.cuda()``,
``tensor.type() == "torch.cuda.FloatTensor"``. :func:`install` changes what those names mean inside
megatron-core's own functions, the loaded ones and those still to be imported: ``cuda`` becomes ``cpu`` in
their code objects, and their ``torch`` becomes a view of torch whose ``torch.cpu`` also has what only
``torch.cuda`` has. torch itself is not touched, so every other caller sees what it always saw.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PACKAGE = "megatron.core"


def install() -> None:
    """Make megatron-core run on the CPU. Does nothing where CUDA is available, or when called again."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if _is_megatron(name):
            _retarget(module)
    _use_cpu_generator()


def _is_megatron(name: str) -> bool:
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


class _Finder(MetaPathFinder):
    """Finds megatron-core's modules as the other finders do, and retargets them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(fullname, path, target)
            if found is not None:
                return _with_our_loader(found)
        return None


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _retarget(module)


def _with_our_loader(spec: ModuleSpec) -> ModuleSpec:
    if not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
        return spec  # a namespace package or compiled code: nothing in there names CUDA
    loader = _Loader(spec.name, spec.origin)
    locations = spec.submodule_search_locations
    ours = spec_from_file_location(
        spec.name, spec.origin, loader=loader, submodule_search_locations=locations
    )
    return ours or spec


# --- What a module's names mean -----------------------------------------------------------------------------


def _retarget(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if value is torch:
            setattr(module, name, _torch)
    for function in _functions(module, module):
        function.__code__ = _on_cpu(function.__code__)
        if function.__defaults__:
            function.__defaults__ = tuple(map(_constant_on_cpu, function.__defaults__))


def _functions(module: ModuleType, owner: ModuleType | type) -> Iterator[FunctionType]:
    """The functions whose source stands in ``module``: its own, and those of its classes."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _functions(module, value)
        for function in _unwrapped(value):
            if function.__globals__ is vars(module):
                yield function


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _unwrapped(accessor)
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__dict__", {}).get("__wrapped__") or getattr(value, "__func__", None)


def _on_cpu(code: CodeType) -> CodeType:
    names = tuple("cpu" if name == "cuda" else name for name in code.co_names)
    return code.replace(co_names=names, co_consts=tuple(map(_constant_on_cpu, code.co_consts)))


def _constant_on_cpu(constant: Any) -> Any:
    if isinstance(constant, str):
        if constant == "cuda":
            return "cpu"
        if constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, CodeType):
        return _on_cpu(constant)
    if type(constant) is tuple:
        return tuple(map(_constant_on_cpu, constant))
    return constant


class _View(ModuleType):
    """A module seen through ``names``; every other name is the real module's."""

    def __init__(self, real: ModuleType, names: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_cpu = _View(
    torch.cpu,
    {
        "is_available": lambda: False,  # megatron-core asks whether there is a GPU
        "manual_seed": torch.manual_seed,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "default_stream": torch.cpu.current_stream,
        "empty_cache": lambda: None,
        "OutOfMemoryError": torch.OutOfMemoryError,
    },
)
_torch = _View(torch, {"cpu": _cpu})


# --- Random numbers -----------------------------------------------------------------------------------------


def _use_cpu_generator() -> None:
    """megatron-core's named random states become states of the CPU generator."""
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        states_: dict[str, torch.Tensor]
        _current_state_name: str

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            """As megatron-core's, without its complaint that the CPU generator moved: here it is meant to."""
            if name not in self.states_:
                raise KeyError(f"random state {name} was not added to the tracker")
            outer_name, outer_state = self._current_state_name, torch.get_rng_state()
            if outer_name != "default-rng":
                self.states_[outer_name] = outer_state
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(self.states_.get(outer_name, outer_state))
                self._current_state_name = outer_name

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
