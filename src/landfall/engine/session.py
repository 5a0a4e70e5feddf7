"""What a rank needs for all its saves and loads, made once, before training fills the memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import xxhash

from landfall.coord.base import Coordinator
from landfall.coord.solo import SoloCoordinator
from landfall.engine.stage import Stager

DEADLINE_S = 600.0
"""How long ranks wait for one that makes no progress."""


@dataclass
class Session:
    """One rank's coordinator and staging buffers, and the count of saves that names them.

    Every rank makes its session at the same point of the program and calls :func:`landfall.engine.save.save`
    the same number of times in the same order: that is how save_ids agree without a message.
    """

    coordinator: Coordinator
    stager: Stager
    deadline_s: float = DEADLINE_S
    """How long to wait for a rank that makes no progress."""
    num_saves: int = 0
    stale_keys: list[str] = field(default_factory=list)
    """Keys of messages that the save under way has posted besides its report and its outcome."""
    old_messages: list[list[str]] = field(default_factory=list)
    old_notes: list[list[str]] = field(default_factory=list)
    last_saved: tuple[int, str] | None = None
    """Step and digest of this rank's tensors in the last save that was committed."""
    sending_stager: Stager | None = None
    """For the thread that sends columns of matrices to other ranks, where tensor parallelism splits them."""

    @property
    def rank(self) -> int:
        return self.coordinator.rank

    def next_save_id(self) -> str:
        """``lf<digest of run_id>-<count>``: unique over restarts, the same on every rank."""
        self.num_saves += 1
        return f"lf{xxhash.xxh3_64_hexdigest(self.coordinator.run_id.encode())}-{self.num_saves}"

    def forget_old_messages(self, keys: list[str], notes: list[str]) -> None:
        """Drop the messages of the save before the last one, and remember this one's ``keys`` and ``notes``.

        Not those of the last one: a rank that was slow in it may not have read the answer yet. But it has
        been in it, so it has read that of the one before.
        """
        self.old_messages.append([*keys, *self.stale_keys])
        self.old_notes.append(notes)
        self.stale_keys = []
        if len(self.old_messages) > 2:
            for key in self.old_messages.pop(0):
                self.coordinator.drop(key)
            self.coordinator.erase(self.old_notes.pop(0))


def solo_session() -> Session:
    """A session of one rank on the CPU."""
    return Session(SoloCoordinator(), Stager(torch.device("cpu")))
