"""Ranks that hang, die or can't start are seen, told and ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from landfall.repro.cases import Launch, Step
from landfall.repro.outcome import Result
from landfall.repro.ranks import Ranks
from landfall.repro.watch import Watch


class Quiet:
    """A view of nothing, which may do something when ranks come to a phase."""

    def __init__(self, at: str = "", then: object = None) -> None:
        self.at, self.then = at, then

    def begin(self, launches: Sequence[Launch]) -> None: ...

    def phase(self, step: Step, phase: str, num_ranks: int) -> None:
        if phase == self.at and num_ranks == 2 and callable(self.then):
            self.then()

    def result(self, result: Result) -> None: ...


def hanging_save(folder: Path) -> Step:
    """Rank 1 opens a pipe that nobody reads where its file should be, and stays there."""
    (folder / "save").mkdir()
    os.mkfifo(folder / "save" / "__1_0.distcp")
    return Step("dcp_gloo", "roomy", "save", folder=str(folder / "save"))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ranks_that_hang_are_stopped_and_say_where_they_were(tmp_path: Path) -> None:
    steps = [hanging_save(tmp_path), Step("dcp_gloo", "roomy", "load", sources=(str(tmp_path / "save"),))]
    with Ranks(Launch(steps), 2, tmp_path / "launch", num_devices=0) as ranks:
        pids = [process.pid for process in ranks._processes]
        hung, after = Watch(ranks, 2, 2.0, Quiet()).run()
        assert not any(is_alive(pid) for pid in pids)
    assert hung.ranks("hung") == [0, 1] and not hung.ok
    waiting, opening = (attempt.failure for attempt in hung.attempts)
    assert waiting is not None and "gather_object" in waiting.functions
    assert opening is not None and opening.frames[-1].function in ("open", "create_stream")
    assert after.ranks("not reached") == [0, 1]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    with Ranks(Launch([hanging_save(tmp_path)]), 2, tmp_path / "launch", num_devices=0) as ranks:
        victim = ranks._processes[1].pid
        started = time.monotonic()
        (result,) = Watch(ranks, 2, 60.0, Quiet("saving", lambda: os.kill(victim, signal.SIGKILL))).run()
        assert time.monotonic() - started < 45
    assert result.ranks("died") == [1]
    told = result.attempts[1].failure
    assert told is not None and "exit code -9" in told.message
