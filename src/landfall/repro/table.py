"""The outcome on a terminal."""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from landfall.repro.cause import TRIPWIRE, cause
from landfall.repro.outcome import Outcome, Result
from landfall.repro.words import (
    blocks,
    facts,
    free_line,
    full_title,
    labels,
    machine,
    race_lines,
    source_line,
    step_title,
    titles,
    training,
    trouble,
    verdict,
)


def show(outcome: Outcome, console: Console) -> None:
    """Print everything, the side-by-side table first and the verdict last."""
    console.print()
    for line in (machine(outcome), training(outcome), free_line(outcome)):
        _tell(console, line)
    if not outcome.on_gpu:
        _tell(console, TRIPWIRE, style="yellow")
    console.print(side_by_side(outcome))
    _tell(console, source_line(outcome))
    for number, line in enumerate(race_lines(outcome)):
        _tell(console, line, style="" if number else "bold", indent=2 * bool(number))
    _show_trouble(outcome, console)
    console.print("\nWhy", style="bold")
    for number, line in enumerate(cause(outcome), start=1):
        _tell(console, f"{number}. {line}", indent=2, hang=3)
    console.print()
    for check in outcome.checks:
        told = check.claim + (f": {check.seen}" if check.seen else "")
        sign, style = ("yes", "green") if check.holds else ("NO ", "bold red")
        _tell(console, f"{sign}  {told}", indent=2, hang=5, style=style)
    console.print()
    _tell(console, final_line(outcome), style="bold green" if outcome.ok else "bold red")


def _tell(console: Console, line: str, *, style: str = "", indent: int = 0, hang: int = 0) -> None:
    """A paragraph, broken at words; nothing for an empty one."""
    margin = " " * indent
    for row in textwrap.wrap(
        line, console.width - 1, initial_indent=margin, subsequent_indent=margin + " " * hang
    ):
        console.print(row, style=style or None, markup=False, soft_wrap=True)


def final_line(outcome: Outcome) -> str:
    """The verdict in one line."""
    if not outcome.checks:
        return f"Neither stock nor landfall ran, so there is nothing to judge. ({outcome.seconds:.0f} s)"
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
    for title in titles(outcome):
        table.add_column(title, header_style="bold", overflow="fold")
    for block in blocks(outcome):
        title = step_title(block[0].step, on_gpu=outcome.on_gpu)
        table.add_row(Text(title, style="bold"), *(verdict_text(result) for result in block))
        rows = [facts(result, on_gpu=outcome.on_gpu) for result in block]
        for label in labels(rows):
            table.add_row(Text(f"  {label}", style="dim"), *(row.get(label, "") for row in rows))
        table.add_section()
    return table


def verdict_text(result: Result) -> Text:
    """Green where it went well, red where not."""
    return Text(verdict(result), style="green" if result.ok else "bold red")


def _show_trouble(outcome: Outcome, console: Console) -> None:
    """Places are not broken into lines, so that they can be copied."""
    for result in outcome.results:
        if lines := trouble(result):
            title = f"\n{full_title(result, outcome)}"
            console.print(title, style="bold", markup=False, soft_wrap=True)
            for line in lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)
