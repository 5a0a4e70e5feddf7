"""What a rank needs for all its saves and loads, made once, before training fills the memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import xxhash

from landfall.coord.base import Coordinator
from landfall.coord.solo import SoloCoordinator
from landfall.engine.stage import Stager

DEADLINE_S = 1800.0


@dataclass
class Session:
    """One rank's coordinator and staging buffers, and the count of saves that names them.

    Every rank makes its session at the same point of the program and calls :func:`landfall.engine.save.save`
    the same number of times in the same order: that is how save_ids agree without a message.
    """

    coordinator: Coordinator
    stager: Stager
    deadline_s: float = DEADLINE_S
    num_saves: int = 0
    stale_keys: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.coordinator.rank

    def next_save_id(self) -> str:
        """``lf<digest of run_id>-<count>``: unique over restarts, the same on every rank."""
        self.num_saves += 1
        return f"lf{xxhash.xxh3_64_hexdigest(self.coordinator.run_id.encode())}-{self.num_saves}"

    def forget_old_messages(self, keys: list[str]) -> None:
        """Drop the messages of the save before, which everybody has read by now, and remember ``keys``."""
        for key in self.stale_keys:
            self.coordinator.drop(key)
        self.stale_keys = keys


def solo_session() -> Session:
    """A session of one rank on the CPU."""
    return Session(SoloCoordinator(), Stager(torch.device("cpu")))
