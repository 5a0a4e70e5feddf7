"""Signs of life during a save, so that a long write is not taken for death, nor death for a long write."""

from __future__ import annotations

import threading

import msgspec

from landfall.coord.base import Coordinator
from landfall.errors import DeadlineError, SaveError

MOST_S = 2.0
"""The longest time between two signs of life."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """``count`` rises with everything that is done: a rank whose count stands still makes no progress."""

    count: int
    num_bytes: int
    doing: str


class Pulse:
    """One rank's signs of life in one save; a context manager, and nothing at all in a job of one rank.

    A thread of its own tells them and finds out when rank 0 has given the save up, so that nobody goes on
    writing what will be thrown away: :meth:`advance` raises SaveError then.
    """

    def __init__(self, coordinator: Coordinator, save_id: str, deadline_s: float) -> None:
        self._coordinator, self._save_id = coordinator, save_id
        self._interval_s = min(MOST_S, deadline_s / 5)
        self._count = self._num_bytes = 0
        self._doing = "begins"
        self._is_given_up = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        if self._coordinator.world_size > 1:
            self._thread = threading.Thread(target=self._beat, name="landfall-pulse", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def advance(self, num_bytes: int = 0, doing: str = "") -> None:
        """Something was done: ``num_bytes`` written, or ``doing`` begun."""
        self._count += 1
        self._num_bytes += num_bytes
        self._doing = doing or self._doing
        if self._is_given_up:
            raise SaveError("Rank 0 has given this save up, so this rank stopped writing")

    def _beat(self) -> None:
        key = beat_key(self._save_id, self._coordinator.rank)
        told = None
        try:
            while not self._ended.is_set():
                beat = Beat(self._count, self._num_bytes, self._doing)
                if beat != told:
                    self._coordinator.note(key, msgspec.msgpack.encode(beat))
                    told = beat
                if not self._is_given_up and self._coordinator.rank:
                    self._is_given_up = bool(self._coordinator.notes([given_up_key(self._save_id)]))
                self._ended.wait(self._interval_s)
        except DeadlineError:
            self._is_given_up = True  # rank 0 is gone; whoever waits for it says so


def beat_key(save_id: str, rank: int) -> str:
    return f"save/{save_id}/beat/{rank}"


def given_up_key(save_id: str) -> str:
    """The note by which rank 0 says that a save has failed already."""
    return f"save/{save_id}/given up"


def describe_beat(note: bytes | None) -> str:
    """The last sign of life for an error message."""
    if note is None:
        return "nothing at all in this save"
    beat = msgspec.msgpack.decode(note, type=Beat)
    return f"{beat.doing}, {beat.num_bytes:,} bytes written"
