"""The one conversation of a save: everyone reports to rank 0, rank 0 commits and answers."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from landfall.engine.commit import commit
from landfall.engine.contents import Contents
from landfall.engine.protocol import Step, reached
from landfall.engine.pulse import Pulse, beat_key, describe_beat, given_up_key
from landfall.engine.session import Session
from landfall.errors import DeadlineError, LandfallError, RefusedError, SaveError
from landfall.format.manifest import Writer
from landfall.format.plan import TableDigest, disagreements
from landfall.store.base import Store
from landfall.store.local import free_bytes

LONGEST_PAUSE_S = 0.05
"""Between two looks for messages, and as long again for each 1,000 that are missing."""
OTHERS_S = 0.3
"""How long to wait for other ranks' failures after the first, to tell of all at once."""


class Report(msgspec.Struct, frozen=True):
    """What a rank tells rank 0 when its part is durable, or why it is not."""

    rank: int
    step: int
    place: str
    error: str
    tables: list[TableDigest]
    index: str = ""
    index_digest: str = ""
    num_bytes: int = 0
    tensors: str = ""
    unchanged_since: int | None = None
    """The step of the last save, if no byte of a tensor has changed since on this rank."""
    follows: bool = False
    """Whether the error is that another rank was lost, which then tells more."""


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 answers: the committed manifest's bytes, or why there is none."""

    error: str
    manifest: bytes = b""
    missing: list[int] = []
    is_refusal: bool = False


def agree(
    report: Report, contents: Contents | None, store: Store, session: Session, save_id: str, pulse: Pulse
) -> Outcome:
    """Every rank calls it with what it did; the answer is the same on every rank.

    Raises SaveError on a rank that gets no answer because rank 0 is gone.
    """
    reports_key, outcome_key = f"save/{save_id}/report", f"save/{save_id}/outcome"
    notes = [beat_key(save_id, report.rank)]
    if report.rank == 0:
        notes.append(given_up_key(save_id))
    session.forget_old_messages([reports_key, outcome_key], notes)
    with contextlib.suppress(SaveError):  # that the save is given up is what we are about to hear
        pulse.advance(doing="has reported")
    try:
        session.coordinator.post(reports_key, msgspec.msgpack.encode(report))
        reached(Step.REPORTED)
        if report.rank == 0:
            return _lead(contents, store, session, save_id, pulse, reports_key, outcome_key)
        return _wait_for_rank0(session, save_id, outcome_key)
    except DeadlineError as error:
        raise SaveError(
            "The save was not committed as far as this rank can tell",
            where=f"rank {report.rank}, step {report.step}, {report.place}",
            got=str(error),
            do="see what rank 0 says; the checkpoint that was committed before is untouched",
        ) from error


def _lead(
    contents: Contents | None,
    store: Store,
    session: Session,
    save_id: str,
    pulse: Pulse,
    reports_key: str,
    outcome_key: str,
) -> Outcome:
    """Rank 0: collect, decide, answer. A failure is answered at once, and then the others are awaited, so
    that all ranks leave the save together."""
    coordinator = session.coordinator
    reports = _Reports(session, save_id, reports_key, pulse)
    outcome = _decide(reports, contents, store, save_id)
    if outcome.error:
        coordinator.note(given_up_key(save_id), b"")
    coordinator.post(outcome_key, msgspec.msgpack.encode(outcome))
    reached(Step.ANSWERED)
    if outcome.error and not outcome.missing:
        try:
            reports.collect(until_failure=False)
        except _RanksMissing as late:
            return Outcome(f"{outcome.error}\n{late}", missing=late.ranks)
    return outcome


def _decide(reports: _Reports, contents: Contents | None, store: Store, save_id: str) -> Outcome:
    """Rank 0: commit if every rank's part is durable and all tell the same story."""
    try:
        found = reports.collect(until_failure=True)
        if fault := _find_fault(found):
            return fault
        reached(Step.AGREED)
        assert contents is not None
        writers = [Writer(r.rank, r.index, r.index_digest, r.num_bytes) for r in found.values()]
        step = found[0].step
        with told_as_save_error(0, step, store):
            manifest = commit(contents, store, save_id, writers, step=step, stale_since=_stale(found))
        return Outcome("", manifest.encode())
    except _RanksMissing as late:
        return Outcome(str(late), missing=late.ranks)
    except LandfallError as error:
        return Outcome(str(error), is_refusal=isinstance(error, RefusedError))


class _RanksMissing(SaveError):
    def __init__(self, what: str, ranks: list[int], where: str) -> None:
        self.ranks = ranks
        super().__init__(
            "Ranks gave no sign of life, and the save was not committed",
            where=where,
            got=what,
            do="look at the logs and machines of these ranks, then start the job again; the checkpoint that "
            "was committed before is untouched",
        )


class _Reports:
    """The reports as they come in on rank 0, and how long ago each rank gave a sign of life."""

    def __init__(self, session: Session, save_id: str, key: str, pulse: Pulse) -> None:
        self._coordinator, self._deadline_s = session.coordinator, session.deadline_s
        self._save_id, self._key, self._pulse = save_id, key, pulse
        self._reports: dict[int, Report] = {}
        now = time.monotonic()
        self._beats: dict[int, bytes | None] = {}
        self._alive = dict.fromkeys(range(session.coordinator.world_size), now)

    def collect(self, *, until_failure: bool) -> dict[int, Report]:
        """All reports by rank, or those until the first failure; raises _RanksMissing."""
        pause = _Pause()
        while pending := self._pending():
            if self._take(pending):
                pause = _Pause()
            if until_failure and any(report.error for report in self._reports.values()):
                time.sleep(OTHERS_S)
                self._take(self._pending())
                break
            self._look_for_life()
            pause.sleep(len(pending))
        return dict(sorted(self._reports.items()))

    def _pending(self) -> list[int]:
        return [rank for rank in self._alive if rank not in self._reports]

    def _take(self, pending: list[int]) -> bool:
        """Read the reports that are there; whether there were any."""
        there = self._coordinator.arrived(self._key, pending)
        found = self._coordinator.collect(self._key, there, self._deadline_s) if there else {}
        for rank, data in found.items():
            self._reports[rank] = msgspec.msgpack.decode(data, type=Report)
            self._advance()
        return bool(found)

    def _look_for_life(self) -> None:
        now, pending = time.monotonic(), self._pending()
        keys = {beat_key(self._save_id, rank): rank for rank in pending}
        notes = self._coordinator.notes(list(keys)) if keys else {}
        for key, note in notes.items():
            if self._beats.get(keys[key]) != note:
                self._beats[keys[key]], self._alive[keys[key]] = note, now
                self._advance()
        late = [rank for rank in pending if now - self._alive[rank] > self._deadline_s]
        if late:
            told = [f"rank {rank}: {describe_beat(self._beats.get(rank))}" for rank in late[:8]]
            more = f"; and {len(late) - 8} more" if len(late) > 8 else ""
            got = (
                f"no answer from rank {', '.join(map(str, late[:8]))} for {self._deadline_s:g} s; last seen: "
            )
            raise _RanksMissing(got + "; ".join(told) + more, late, f"save {self._save_id}")

    def _advance(self) -> None:
        self._pulse.advance(doing="collects what the others report")


class _Pause:
    """Short at first, longer while nothing happens: a save of a small model should not wait for a clock."""

    def __init__(self) -> None:
        self._seconds = 0.001

    def sleep(self, num_missing: int) -> None:
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, LONGEST_PAUSE_S * (1 + num_missing / 1000))


def _wait_for_rank0(session: Session, save_id: str, outcome_key: str) -> Outcome:
    """Rank 0 may need its whole deadline to find out who is missing before it can answer."""
    coordinator, key, pause = session.coordinator, beat_key(save_id, 0), _Pause()
    alive, last = time.monotonic(), None
    while not coordinator.arrived(outcome_key, [0]):
        beat = coordinator.notes([key]).get(key)
        if beat != last:
            alive, last = time.monotonic(), beat
        if time.monotonic() - alive > 2 * session.deadline_s:
            raise DeadlineError(
                f"Rank 0 has made no progress for {2 * session.deadline_s:g} s",
                missing=(0,),
                where=f"save {save_id}; last seen: {describe_beat(last)}",
                do="look at the log of rank 0",
            )
        pause.sleep(session.coordinator.world_size)
    answer = coordinator.collect(outcome_key, [0], session.deadline_s)[0]
    return msgspec.msgpack.decode(answer, type=Outcome)


def _find_fault(reports: dict[int, Report]) -> Outcome | None:
    """Why these reports can't be committed; None when they can."""
    failed = sorted((r for r in reports.values() if r.error), key=lambda report: report.follows)
    if failed:
        others = f"\n  also failed: ranks {[report.rank for report in failed[1:]]}" if failed[1:] else ""
        return Outcome(failed[0].error + others)
    first = reports[0]
    for report in reports.values():
        if (report.step, report.place) != (first.step, first.place):
            return Outcome(
                "Ranks save different things\n"
                f"  where: rank {report.rank} saves step {report.step} into {report.place}\n"
                f"  expected: as rank 0, step {first.step} into {first.place}",
                is_refusal=True,
            )
    if groups := disagreements({rank: report.tables for rank, report in reports.items()}):
        return Outcome(
            "Ranks that should hold the same tensors hold different ones\n"
            f"  where: step {first.step}, ranks {groups[0]}\n"
            "  expected: the same names, shapes and dtypes on all of them\n"
            "  do: check that these ranks built the same model",
            is_refusal=True,
        )
    return None


def _stale(reports: dict[int, Report]) -> int | None:
    """The step of the last save, if steps were taken since and no tensor of any rank has changed."""
    since = {report.unchanged_since for report in reports.values() if report.tensors}
    step = since.pop() if len(since) == 1 else None
    return step if step is not None and step < reports[0].step else None


@contextlib.contextmanager
def told_as_save_error(rank: int, step: int, store: Store) -> Iterator[None]:
    """Turn what goes wrong while saving into a SaveError that says who, what and where."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        place = str(error.filename or store.describe())
        raise SaveError(
            "The checkpoint could not be written",
            where=f"rank {rank}, step {step}, {place}",
            got=f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}{_free(place)}",
            do="make room or mend the file system; the checkpoint that was committed before is untouched",
        ) from error
    except Exception as error:
        where = f"rank {rank}, step {step}, {store.describe()}"
        raise SaveError("The save failed", where=where, got=f"{type(error).__name__}: {error}") from error


def _free(place: str) -> str:
    free = free_bytes(Path(place)) if place.startswith("/") else None
    return "" if free is None else f" ({free:,} bytes free there)"
