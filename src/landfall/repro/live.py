"""How it goes while it runs: a table that fills on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from landfall.repro.cases import Launch, Step
from landfall.repro.outcome import Result
from landfall.repro.words import step_title, verdict, writer_title

PHASES = {
    "importing": "starting",
    "ready": "starting",
    "joining": "joining",
    "training": "training",
    "preparing": "filling",
    "saving": "saving",
    "reading": "loading",
}
"""A rank's phases, as they are told."""


class LinesView:
    """For a file, a pipe, a log: a line for each step that has ended."""

    def __init__(self, console: Console, num_ranks: int, *, on_gpu: bool) -> None:
        self._console, self._num_ranks, self._on_gpu = console, num_ranks, on_gpu
        self._count = self._total = self._num_races = self._races_done = 0
        self._started = time.monotonic()

    def begin(self, launches: Sequence[Launch]) -> None:
        steps = [step for launch in launches for step in launch.steps]
        self._total = sum(not step.repeat for step in steps)
        self._num_races = len(steps) - self._total
        self._say(f"{len(launches)} times {self._num_ranks} fresh ranks, which train a little first")

    def phase(self, step: Step, phase: str, num_ranks: int) -> None:
        pass

    def result(self, result: Result) -> None:
        if result.step.repeat:
            self._races_done += 1
            if self._races_done == self._num_races:
                self._say(f"{self._num_races} repeated saves, for their times")
            return
        self._count += 1
        who = writer_title(result.step.writer, on_gpu=self._on_gpu)
        what = step_title(result.step, on_gpu=self._on_gpu)
        seconds = f" ({result.seconds:.2f} s)" if result.ok or result.first_failure else ""
        self._say(f"{self._count:>2}/{self._total}  {who:16}  {what:20}  {verdict(result)}{seconds}")

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"{elapsed:5.1f} s  {text}", markup=False, soft_wrap=True)

    def __enter__(self) -> LinesView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class TableView:
    """For a terminal: writers beside each other, each cell with what its ranks do now."""

    def __init__(self, console: Console, num_ranks: int, *, on_gpu: bool) -> None:
        self._num_ranks, self._on_gpu = num_ranks, on_gpu
        self._steps: list[Step] = []
        self._cells: dict[str, Text | Spinner] = {}
        self._num_races, self._races_done = 0, 0
        self._started = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def begin(self, launches: Sequence[Launch]) -> None:
        steps = [step for launch in launches for step in launch.steps]
        self._steps = [step for step in steps if not step.repeat]
        self._num_races = len(steps) - len(self._steps)

    def phase(self, step: Step, phase: str, num_ranks: int) -> None:
        if phase in PHASES:
            text = f"{PHASES[phase]} {num_ranks}/{self._num_ranks}"
            before = self._cells.get(step.name)
            if isinstance(before, Spinner):
                before.update(text=text)
            else:
                self._cells[step.name] = Spinner("dots", text)

    def result(self, result: Result) -> None:
        self._races_done += bool(result.step.repeat)
        told = verdict(result) + (f" {result.seconds:.2f} s" if result.ok else "")
        self._cells[result.step.name] = Text(told, style="green" if result.ok else "bold red")

    def __enter__(self) -> TableView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _render(self) -> Table:
        elapsed = time.monotonic() - self._started
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
        table.title = f"landfall repro: {self._num_ranks} ranks, {elapsed:.0f} s"
        if self._races_done:
            table.caption = f"repeated saves: {self._races_done} of {self._num_races}"
        writers = list(dict.fromkeys(step.writer for step in self._steps))
        table.add_column("", min_width=20)
        for writer in writers:
            table.add_column(writer_title(writer, on_gpu=self._on_gpu), min_width=18)
        rows = dict.fromkeys((step.room, step.action) for step in sorted(self._steps, key=_row_order))
        for room, action in rows:
            title = step_title(Step("stock", room, action), on_gpu=self._on_gpu)
            cells = [
                self._cells.get(f"{writer}/{room}/{action}", Text("-", style="dim")) for writer in writers
            ]
            table.add_row(title, *cells)
        return table


def _row_order(step: Step) -> tuple[bool, bool]:
    return step.room == "full", step.action == "load"
