"""Starts ranks, watches them, ends those that hang, and puts together what became of every step."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from landfall.engine.verify import verify
from landfall.errors import LandfallError
from landfall.repro.cases import Launch, Step, Writer, plan_launches
from landfall.repro.outcome import About, Outcome, Race, Result
from landfall.repro.ranks import Ranks
from landfall.repro.training import NUM_BYTES
from landfall.repro.verdict import judge
from landfall.repro.watch import Watch


class View(Protocol):
    """Whoever wants to see how it goes."""

    def begin(self, launches: Sequence[Launch]) -> None: ...

    def phase(self, step: Step, phase: str, num_ranks: int) -> None:
        """``num_ranks`` ranks have come to ``phase``."""
        ...

    def result(self, result: Result) -> None: ...


def conduct(writers: Sequence[Writer], num_ranks: int, timeout_s: float, view: View) -> Outcome:
    """Run everything and judge it. A save or load is given ``timeout_s``; then its ranks count as hanging.

    Raises LandfallError when ranks can't be started at all.
    """
    started = time.monotonic()
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with _scratch() as root:
        launches = plan_launches(writers, str(root), on_gpu=num_devices > 0)
        view.begin(launches)
        results: list[Result] = []
        about: About | None = None
        for ranks in _one_after_the_other(launches, num_ranks, root, num_devices):
            watch = Watch(ranks, num_ranks, timeout_s, view)
            results += watch.run()
            about = about or watch.about
            _stop_if_nothing_works(results, about)
        damage = _verify_ours(results)
    assert about is not None
    plain = [result for result in results if not result.step.repeat]
    checks = judge(plain, about, damage, on_gpu=num_devices > 0)
    return Outcome(
        ok=all(check.holds for check in checks),
        on_gpu=num_devices > 0,
        num_ranks=num_ranks,
        about=about,
        results=plain,
        races=_races(results),
        checks=checks,
        seconds=time.monotonic() - started,
        num_bytes=NUM_BYTES,
    )


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="landfall-repro-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _one_after_the_other(
    launches: Sequence[Launch], num_ranks: int, root: Path, num_devices: int
) -> Iterator[Ranks]:
    """Ranks that may begin. With cores to spare the next ones already import while these work."""
    num_ahead = 1 if (os.cpu_count() or 1) >= 2 * num_ranks else 0
    with ExitStack() as stack:
        waiting: list[Ranks] = []
        for number in range(len(launches)):
            while len(waiting) <= num_ahead and number + len(waiting) < len(launches):
                place = number + len(waiting)
                ranks = Ranks(launches[place], num_ranks, root / f"launch-{place}", num_devices=num_devices)
                waiting.append(stack.enter_context(ranks))
            yield waiting.pop(0)


def _stop_if_nothing_works(results: list[Result], about: About | None) -> None:
    """If the ranks did not even come to train, all that follows would fail the same way."""
    if about is not None:
        return
    failures = [result.first_failure for result in results]
    rank, failure = next(found for found in failures if found is not None)
    raise LandfallError(
        "The ranks could not be started",
        where=f"rank {rank}, " + (str(failure.frames[-1]) if failure.frames else "before its first step"),
        got=f"{failure.kind}: {failure.message}",
        do="check that torch, megatron-core and (on a GPU) NCCL work on this machine",
    )


def _verify_ours(results: list[Result]) -> list[str]:
    """What is wrong with the checkpoints that landfall says it saved, from their files alone."""
    faults = []
    for result in results:
        step = result.step
        if step.writer == "landfall" and step.action == "save" and result.ok:
            try:
                faults += verify(step.folder).faults
            except LandfallError as error:
                faults.append(str(error))
    return faults


def _races(results: list[Result]) -> list[Race]:
    """The first save of each is not counted: it is told apart by its repeat, which begins with 1."""
    seconds: dict[str, list[float]] = {}
    for result in results:
        if result.step.repeat > 1 and result.ok:
            seconds.setdefault(result.step.writer, []).append(result.seconds)
    return [Race(writer, times) for writer, times in seconds.items()]
