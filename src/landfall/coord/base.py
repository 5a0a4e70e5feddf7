"""Agreement between ranks by messages on the CPU: no collective, no device, a deadline for every wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from landfall.errors import DeadlineError


class StoreLostError(DeadlineError):
    """Rank 0, which keeps the messages, is gone: the coordinator is of no more use. ``missing`` is (0,)."""

    def __init__(self, *, where: str, got: str) -> None:
        super().__init__(
            "Rank 0, which keeps the messages of all ranks, is gone",
            missing=(0,),
            where=f"the message store at {where} ({got})",
            do="look at the log of rank 0 and whether its machine is up; then start the job again",
        )


class Coordinator(ABC):
    """What one rank uses to talk to the others.

    A message is posted once under a key and stays until it is dropped. Waiting for a message never
    disturbs another rank or another thread of this one, and a wait that runs out raises
    :class:`~landfall.errors.DeadlineError`, which names the ranks that did not post; everything stays
    usable afterwards. Only when rank 0 itself is gone does every call raise :class:`StoreLostError`: at
    once if its process ended, soon after the deadline if its machine is frozen or cut off. Any number of
    threads may use one coordinator.
    """

    rank: int
    world_size: int
    run_id: str
    """One short name for this start of the job, the same on every rank."""

    @abstractmethod
    def post(self, key: str, payload: bytes) -> None:
        """Publish ``payload`` as this rank's message under ``key``, once for a key until it is dropped.

        Does not wait for another rank. A message may have many MiB; one of a few hundred bytes is cheapest.
        """

    @abstractmethod
    def collect(self, key: str, ranks: Iterable[int], deadline_s: float) -> dict[int, bytes]:
        """The messages that ``ranks`` posted under ``key``, in rising order of rank.

        Waits for those that are not there yet; raises DeadlineError with exactly the ``missing`` ranks
        when ``deadline_s`` seconds have passed. The messages stay for others to collect.
        """

    @abstractmethod
    def arrived(self, key: str, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have posted under ``key`` by now. Never waits for one."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget this rank's message under ``key``, if it is there. Whoever still needs it comes too late."""

    @abstractmethod
    def note(self, key: str, payload: bytes) -> None:
        """Put up a note for everybody, in place of the one that was there under ``key``, whoever wrote it."""

    @abstractmethod
    def notes(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those notes under ``keys`` that are there now. Never waits for one."""

    @abstractmethod
    def erase(self, keys: Sequence[str]) -> None:
        """Take notes down; nothing happens where there is none."""

    def close(self, deadline_s: float = 30.0) -> tuple[int, ...]:
        """Leave, once and last. The messages go with rank 0, so rank 0 waits until the others have left.

        Returns the ranks that had not left when ``deadline_s`` had passed: () on every other rank.
        """
        return ()

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
