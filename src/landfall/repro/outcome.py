"""What became of a save or load: on one rank, and on all of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from landfall.repro.cases import Step

Ended = Literal["done", "failed", "hung", "died", "skipped", "not reached"]


class Frame(msgspec.Struct, frozen=True):
    """A place in the code, the file relative to where packages lie."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Failure(msgspec.Struct, frozen=True):
    """An exception, or where a rank hung; frames from the outermost to the innermost."""

    kind: str
    message: str
    frames: list[Frame]

    @property
    def functions(self) -> list[str]:
        return [frame.function for frame in self.frames]


class Memory(msgspec.Struct, frozen=True):
    """Device memory between entry and exit of a step, in bytes.

    ``driver`` is how much less the driver has to give afterwards, on the whole device; ``reserved`` how much
    more of it torch's allocator holds for this rank, ``peak`` how much more than at entry it ever handed out,
    ``allocations`` how often.
    """

    device: int
    driver: int
    reserved: int
    peak: int
    allocations: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a step. ``collectives`` are the calls to NCCL (or to the tripwire) by name, None if
    they could not be counted; ``intact`` says whether what was loaded is what was saved, bit for bit."""

    ended: Ended
    seconds: float = 0.0
    at_s: float = 0.0
    """When it ended, in seconds since the epoch: which rank was first."""
    failure: Failure | None = None
    memory: Memory | None = None
    collectives: dict[str, int] | None = None
    intact: bool | None = None
    source: str = ""
    is_final: bool = True
    """False when the rank still waits for the others before it reads its memory."""


class About(msgspec.Struct, frozen=True):
    """What ran, as seen by rank 0 of the first launch."""

    torch: str
    megatron_core: str
    nccl: str = ""
    device: str = ""
    device_bytes: int = 0
    num_devices: int = 0
    losses: list[float] = []
    eval_loss: float = 0.0


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a rank's diary. ``broken`` means that the rank can't go on at all."""

    phase: str
    step: str = ""
    attempt: Attempt | None = None
    about: About | None = None
    broken: Failure | None = None
    free_bytes: int = -1


class Result(msgspec.Struct, frozen=True):
    """A step on all ranks; ``attempts`` by rank."""

    step: Step
    attempts: list[Attempt]
    free_bytes: int = -1
    """What the full card had left at entry; -1 where nothing was filled."""

    def ranks(self, ended: Ended) -> list[int]:
        return [rank for rank, attempt in enumerate(self.attempts) if attempt.ended == ended]

    @property
    def ok(self) -> bool:
        """Whether it went well on every rank; a load also has to be intact."""
        return all(attempt.ended == "done" and attempt.intact is not False for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """Until the last rank that got through was done, or until the first one failed."""
        failed = [attempt.seconds for attempt in self.attempts if attempt.ended in ("failed", "died")]
        return min(failed) if failed else max(attempt.seconds for attempt in self.attempts)

    @property
    def first_failure(self) -> tuple[int, Failure] | None:
        """The rank that raised first, and what."""
        failed = [
            (attempt.at_s, rank, attempt.failure)
            for rank, attempt in enumerate(self.attempts)
            if attempt.ended in ("failed", "died") and attempt.failure is not None
        ]
        if not failed:
            return None
        _, rank, failure = min(failed, key=lambda entry: entry[:2])
        return rank, failure

    @property
    def collectives(self) -> dict[str, int] | None:
        """The most calls that a rank made, by name; None if a rank that came to an end could not count."""
        most: dict[str, int] = {}
        for attempt in self.attempts:
            if attempt.ended not in ("done", "failed"):
                continue
            if attempt.collectives is None:
                return None
            for name, count in attempt.collectives.items():
                most[name] = max(most.get(name, 0), count)
        return most

    @property
    def driver_bytes(self) -> int | None:
        """Device memory that the driver gave out and did not get back, over all devices."""
        by_device: dict[int, int] = {}
        for attempt in self.attempts:
            if attempt.memory is None:
                return None
            by_device.setdefault(attempt.memory.device, attempt.memory.driver)
        return sum(by_device.values())

    @property
    def reserved_bytes(self) -> int | None:
        """The part of ``driver_bytes`` that torch's allocators hold."""
        memories = [attempt.memory for attempt in self.attempts]
        return None if None in memories else sum(memory.reserved for memory in memories if memory)

    @property
    def peak_bytes(self) -> int | None:
        """The most that torch's allocator handed out on one rank."""
        memories = [attempt.memory for attempt in self.attempts]
        return None if None in memories else max(memory.peak for memory in memories if memory)


class Race(msgspec.Struct, frozen=True):
    """Times of saves on the full card in the same processes, after a first one that is not counted."""

    writer: str
    seconds: list[float]


class Check(msgspec.Struct, frozen=True):
    """A claim of the report, and whether this run bears it out."""

    claim: str
    holds: bool
    seen: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that ``landfall repro`` found."""

    ok: bool
    on_gpu: bool
    num_ranks: int
    about: About
    results: list[Result]
    races: list[Race]
    checks: list[Check]
    seconds: float
    num_bytes: int
