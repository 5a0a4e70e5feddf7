"""How much memory tensors take at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is active, the way back included."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(n for _, n in self._live.values()))
        return out


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Of the tensors that ``run`` makes (arguments not counted)."""
    with Peak() as peak:
        run()
    return peak.peak_bytes
