"""The coordinator of a job of one rank: its messages stay in this process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence

from landfall.coord.base import Coordinator
from landfall.errors import DeadlineError


class SoloCoordinator(Coordinator):
    """One rank, any number of threads."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.run_id = new_run_id()
        self._messages: dict[str, bytes] = {}
        self._notes: dict[str, bytes] = {}
        self._posted = threading.Condition()

    def post(self, key: str, payload: bytes) -> None:
        with self._posted:
            self._messages[key] = bytes(payload)
            self._posted.notify_all()

    def collect(self, key: str, ranks: Iterable[int], deadline_s: float) -> dict[int, bytes]:
        wanted = set(ranks)
        if not wanted <= {0}:
            raise ValueError(f"ranks {sorted(wanted)} of a world of 1")
        with self._posted:
            if wanted and not self._posted.wait_for(lambda: key in self._messages, timeout=deadline_s):
                raise DeadlineError(
                    f"Waited {deadline_s:g} s in vain for message {key!r}",
                    missing=(0,),
                    where=f"run {self.run_id}",
                )
            return {rank: self._messages[key] for rank in wanted}

    def arrived(self, key: str, ranks: Sequence[int]) -> list[int]:
        with self._posted:
            return [rank for rank in ranks if rank == 0 and key in self._messages]

    def drop(self, key: str) -> None:
        with self._posted:
            self._messages.pop(key, None)

    def note(self, key: str, payload: bytes) -> None:
        with self._posted:
            self._notes[key] = bytes(payload)

    def notes(self, keys: Sequence[str]) -> dict[str, bytes]:
        with self._posted:
            return {key: self._notes[key] for key in keys if key in self._notes}

    def erase(self, keys: Sequence[str]) -> None:
        with self._posted:
            for key in keys:
                self._notes.pop(key, None)


def new_run_id() -> str:
    """A name that sorts by time and is not used twice."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
