"""The outcome on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from landfall.repro.cases import ACTIONS, ROOMS, WRITERS
from landfall.repro.outcome import Outcome, Result
from landfall.repro.words import (
    TRIPWIRE,
    cause,
    facts,
    free_line,
    machine,
    race_lines,
    step_title,
    training,
    trouble,
    verdict,
    writer_title,
)


def show(outcome: Outcome, console: Console) -> None:
    """Print everything, the side-by-side table first and the verdict last."""
    console.print()
    for line in (machine(outcome), training(outcome), free_line(outcome)):
        if line:
            console.print(line, markup=False)
    if not outcome.on_gpu:
        console.print(TRIPWIRE, style="yellow", markup=False)
    console.print(side_by_side(outcome))
    if outcome.races:
        console.print("Repeated saves, in turn in the same processes:", style="bold")
        for line in race_lines(outcome):
            console.print(f"  {line}", markup=False)
        console.print()
    _show_trouble(outcome, console)
    console.print("Why", style="bold")
    for number, line in enumerate(cause(outcome), start=1):
        console.print(Padding(Text(f"{number}. {line}"), (0, 0, 0, 2)))
    console.print()
    for check in outcome.checks:
        sign = Text("  yes  ", style="green") if check.holds else Text("  NO   ", style="bold red")
        console.print(sign + Text(check.claim + (f": {check.seen}" if check.seen else ""), style="default"))
    console.print()
    console.print(final_line(outcome), style="bold green" if outcome.ok else "bold red", markup=False)


def final_line(outcome: Outcome) -> str:
    """The verdict in one line."""
    if not outcome.checks:
        return f"Done in {outcome.seconds:.0f} s. Neither stock nor landfall ran, so there is nothing to judge."
    ran = {result.step.writer for result in outcome.results}
    good = [
        *(["stock fails as reported"] if "stock" in ran else []),
        *(["landfall lands its checkpoints"] if "landfall" in ran else []),
    ]
    told = " and ".join(good) if outcome.ok else "NOT as expected: see NO above"
    return f"{told[0].upper()}{told[1:]}. ({outcome.seconds:.0f} s)"


def side_by_side(outcome: Outcome) -> Table:
    """One column a writer, one block of rows a room and action."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    writers = [writer for writer in WRITERS if any(r.step.writer == writer for r in outcome.results)]
    for writer in writers:
        title = writer_title(writer, on_gpu=outcome.on_gpu, about=outcome.about)
        table.add_column(title, header_style="bold", overflow="fold")
    for room in ROOMS:
        for action in ACTIONS:
            found = {r.step.writer: r for r in outcome.results if (r.step.room, r.step.action) == (room, action)}
            if found:
                _add_block(table, [found[writer] for writer in writers], outcome.on_gpu)
    return table


def _add_block(table: Table, results: list[Result], on_gpu: bool) -> None:
    title = step_title(results[0].step, on_gpu=on_gpu)
    table.add_row(Text(title, style="bold"), *(verdict_text(result) for result in results))
    rows = [facts(result, on_gpu=on_gpu) for result in results]
    labels = list(dict.fromkeys(label for row in rows for label in row))
    for label in labels:
        last = label == labels[-1]
        table.add_row(Text(f"  {label}", style="dim"), *(row.get(label, "") for row in rows), end_section=last)


def verdict_text(result: Result) -> Text:
    """Green where it went well, red where not."""
    return Text(verdict(result), style="green" if result.ok else "bold red")


def _show_trouble(outcome: Outcome, console: Console) -> None:
    for result in outcome.results:
        lines = trouble(result)
        if lines:
            who = writer_title(result.step.writer, on_gpu=outcome.on_gpu, about=outcome.about)
            console.print(f"{who}: {step_title(result.step, on_gpu=outcome.on_gpu)}", style="bold", markup=False)
            for line in lines:
                console.print(Padding(Text(line), (0, 0, 0, 2)))
            console.print()
