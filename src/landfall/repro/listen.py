"""Which calls reached NCCL (or the tripwire that stands in for it), by name."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

BUFFER_ENV = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}
"""How many calls torch's flight recorder keeps: more than a rank makes here."""


class Listener:
    """Counts calls of this process. Made after some calls that must be there: a recorder that heard nothing
    of those is not believed."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._works = bool(self.calls())

    def calls(self) -> Counter[str]:
        """All calls so far."""
        if not self._on_gpu:
            return _counted_by_tripwire()
        return _recorded_by_torch() or _counted_by_groups()

    def since(self, before: Counter[str]) -> dict[str, int] | None:
        """The calls after ``before``; None if they can't be counted here."""
        if not self._works:
            return None
        return dict(self.calls() - before)


def _recorded_by_torch() -> Counter[str]:
    """From torch's flight recorder, which keeps every collective and point-to-point call on NCCL groups."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return Counter()
    trace = pickle.loads(dump(includeStackTraces=False))  # of this process's own making
    return Counter(entry["profiling_name"] for entry in trace.get("entries", []))


def _counted_by_groups() -> Counter[str]:
    """From the sequence numbers of the NCCL groups: how many, not which. For want of the recorder."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return +Counter(
        {
            str(group.group_name): group._get_sequence_number_for_group()
            for group in groups
            if dist.get_backend(group) == "nccl"
        }
    )


def _counted_by_tripwire() -> Counter[str]:
    import landfall.testing.tripwire as tripwire

    return tripwire.calls()
