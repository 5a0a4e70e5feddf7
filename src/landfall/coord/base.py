"""Agreement between ranks by messages on the CPU: no collective, no device, a deadline for every wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class Coordinator(ABC):
    """What one rank uses to talk to the others.

    A message is posted once under a key and stays until it is dropped. Waiting for a message never
    disturbs another rank, and a wait that runs out raises :class:`~landfall.errors.DeadlineError`, which
    names the ranks that did not post; everything stays usable afterwards.
    """

    rank: int
    world_size: int
    run_id: str
    """One short name for this start of the job, the same on every rank."""

    @abstractmethod
    def post(self, key: str, payload: bytes) -> None:
        """Publish ``payload`` as this rank's message under ``key``. Returns at once."""

    @abstractmethod
    def collect(self, key: str, ranks: Iterable[int], deadline_s: float) -> dict[int, bytes]:
        """The messages that ``ranks`` posted under ``key``; waits for those that are not there yet."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget this rank's message under ``key``, if it is there."""

    def exchange(self, key: str, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        """Post, and wait for everybody's message. For start-up only: it costs ranks x ranks reads."""
        self.post(key, payload)
        return self.collect(key, range(self.world_size), deadline_s)

    def from_rank0(self, key: str, payload: bytes | None, deadline_s: float) -> bytes:
        """Rank 0 gives ``payload``; every rank returns it."""
        if self.rank == 0:
            assert payload is not None
            self.post(key, payload)
            return payload
        return self.collect(key, [0], deadline_s)[0]
