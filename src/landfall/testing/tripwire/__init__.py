"""A torch.distributed backend that trains over gloo and, while armed, fails as NCCL does on a full GPU.

    import landfall.testing.tripwire as tripwire      # registers the backend
    torch.distributed.init_process_group("tripwire")
    with tripwire.armed("strict"):
        landfall.save(...)                            # any collective raises NCCL's error

NCCL sets up the channels of gather, scatter, send and receive at their first use, with device memory that
a full GPU does not have: mode "nccl" fails there. Mode "strict" fails at every collective. Groups that ask
for gloo by name stay gloo, as they would beside NCCL.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

Mode = Literal["nccl", "strict"]

ERROR = "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"

POINT_TO_POINT = frozenset({"gather", "scatter", "send", "recv", "recv_anysource"})

COLLECTIVES = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "all_to_all_single",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Methods of ProcessGroup that make all ranks talk, in every torch from 2.6 to 2.13."""

_lock = threading.Lock()
_mode: Mode | None = None
_calls: Counter[str] = Counter()
_calls_while_armed: Counter[str] = Counter()


def arm(mode: Mode) -> None:
    """From now on, in every thread of this process, calls that ``mode`` forbids raise RuntimeError(ERROR)."""
    global _mode
    _mode = mode


def disarm() -> None:
    """Calls work again."""
    global _mode
    _mode = None


@contextlib.contextmanager
def armed(mode: Mode) -> Iterator[None]:
    """Armed inside the block; afterwards as before."""
    before = _mode
    arm(mode)
    try:
        yield
    finally:
        disarm() if before is None else arm(before)


def calls() -> Counter[str]:
    """How often each ProcessGroup method was called in this process so far."""
    return Counter(_calls)


def calls_while_armed() -> Counter[str]:
    """The calls that came while armed, whether they raised or not: tells when an error was swallowed."""
    return +_calls_while_armed


class Tripwire(ProcessGroup):
    """A process group over gloo that counts every call and raises where the mode forbids it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub has the other constructor only
        gloo = ProcessGroupGloo(PrefixStore("tripwire", store), rank, size, timeout)
        # A whole process group, not only its backend: that has every method under the names of this torch.
        self._inner = ProcessGroup(store, rank, size)
        for group in (self._inner, self):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "tripwire"


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Tripwire, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            mode = _mode
            _calls[name] += 1
            _calls_while_armed[name] += mode is not None
        if mode == "strict" or (mode == "nccl" and name in POINT_TO_POINT):
            raise RuntimeError(ERROR)
        return getattr(self._inner, name)(*args, **kwargs)

    return forward


for _name in sorted(POINT_TO_POINT | COLLECTIVES):
    if hasattr(ProcessGroup, _name):
        setattr(Tripwire, _name, _forward(_name))

if "tripwire" not in dist.Backend.backend_list:
    dist.Backend.register_backend("tripwire", Tripwire, devices=["cpu"])
