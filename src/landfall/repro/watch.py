"""Watches the ranks of one launch until every step has an end on every rank, of its own or by the clock."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from landfall.repro.cases import Step
from landfall.repro.outcome import About, Attempt, Event, Failure, Result
from landfall.repro.ranks import Ranks

START_S = 240.0
"""How long ranks may take to import, join and train."""
GRACE_S = 4.0
"""How long the others may go on once one rank has failed: then they hang."""
_LOOK_S = 0.05


class _View(Protocol):
    def phase(self, step: Step, phase: str, num_ranks: int) -> None: ...

    def result(self, result: Result) -> None: ...


class Watch:
    """One launch. ``about`` is what rank 0 said about the machine, if it came so far."""

    def __init__(self, ranks: Ranks, num_ranks: int, timeout_s: float, view: _View) -> None:
        self._ranks, self._num_ranks, self._timeout_s, self._view = ranks, num_ranks, timeout_s, view
        self._steps = {step.name: step for step in ranks.launch.steps}
        self._attempts: dict[str, dict[int, Attempt]] = {name: {} for name in self._steps}
        self._free_bytes: dict[str, int] = {}
        self._broken: dict[int, Failure] = {}
        self._phases: dict[int, tuple[str, str]] = {}
        self._until = 0.0
        self._is_hurried = False
        self._stopped = False
        self.about: About | None = None

    def run(self) -> list[Result]:
        """Let the ranks go; returns a result for every step, in order."""
        self._ranks.go()
        results = []
        for step in self._steps.values():
            if not self._stopped:
                self._until, self._is_hurried = time.monotonic() + START_S, False
                self._wait_for(step)
                if self._num_ended(step) < self._num_ranks:
                    self._stop(step)
            result = self._result(step)
            self._view.result(result)
            results.append(result)
        self._ranks.leave()
        return results

    def _wait_for(self, step: Step) -> None:
        """Until the step has ended on all ranks, or it is certain that it won't."""
        while True:
            self._look()
            all_ended = self._num_ended(step) + len(self._broken) >= self._num_ranks
            if all_ended or time.monotonic() > self._until:
                return
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        for rank in range(self._num_ranks):
            gone = self._ranks.exit_code(rank)
            for event in self._ranks.events(rank):
                self._take(rank, event)
            if (
                gone is not None
                and rank not in self._broken
                and self._phases.get(rank, ("", ""))[1] != "finished"
            ):
                message = f"exit code {gone}\n{self._ranks.output(rank)}"
                self._fail(rank, Failure("the process ended", message.strip(), []))

    def _take(self, rank: int, event: Event) -> None:
        if event.about is not None:
            self.about = event.about
        elif event.broken is not None:
            self._fail(rank, event.broken)
        elif event.attempt is not None:
            if event.attempt.ended == "failed":
                self._hurry()
            self._attempts[event.step][rank] = event.attempt
        else:
            self._enter(rank, event)

    def _enter(self, rank: int, event: Event) -> None:
        self._phases[rank] = (event.step, event.phase)
        if event.phase in ("saving", "reading"):
            if not self._is_hurried:
                self._until = time.monotonic() + self._timeout_s
            if event.free_bytes >= 0:
                lowest = min(event.free_bytes, self._free_bytes.get(event.step, event.free_bytes))
                self._free_bytes[event.step] = lowest
        step = self._steps.get(event.step) or next(iter(self._steps.values()))
        num_ranks = sum(1 for phase in self._phases.values() if phase == (event.step, event.phase))
        self._view.phase(step, event.phase, num_ranks)

    def _fail(self, rank: int, failure: Failure) -> None:
        self._broken[rank] = failure
        self._hurry()

    def _hurry(self) -> None:
        if not self._is_hurried:
            self._until, self._is_hurried = time.monotonic() + GRACE_S, True

    def _num_ended(self, step: Step) -> int:
        return sum(attempt.is_final for attempt in self._attempts[step.name].values())

    def _stop(self, step: Step) -> None:
        """The time is up: see where everybody is, and end them all."""
        attempts = self._attempts[step.name]
        late = [rank for rank in range(self._num_ranks) if rank not in attempts and rank not in self._broken]
        stacks = self._ranks.stacks(late) if late else {}
        self._ranks.kill()
        for rank in late:
            began = self._phases.get(rank, ("", ""))[0] == step.name
            attempts[rank] = Attempt(ended="hung" if began else "not reached", failure=stacks[rank])
        for rank, failure in self._broken.items():
            attempts.setdefault(rank, Attempt(ended="died", at_s=time.time(), failure=failure))
        self._stopped = True

    def _result(self, step: Step) -> Result:
        missing = Attempt(ended="not reached")
        attempts = [self._attempts[step.name].get(rank, missing) for rank in range(self._num_ranks)]
        attempts = [msgspec.structs.replace(attempt, is_final=True) for attempt in attempts]
        return Result(step, attempts, self._free_bytes.get(step.name, -1))
