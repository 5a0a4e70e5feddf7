"""The outcome as a Markdown report and as one JSON object."""

from __future__ import annotations

import platform
from typing import Any

import msgspec

from landfall import __version__
from landfall.repro.cases import ACTIONS, ROOMS, WRITERS
from landfall.repro.outcome import Outcome, Result
from landfall.repro.table import final_line
from landfall.repro.words import (
    TRIPWIRE,
    cause,
    facts,
    free_line,
    labels,
    machine,
    race_lines,
    step_title,
    training,
    trouble,
    verdict,
    writer_title,
)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Everything measured, with what follows from it for each step (``verdict``, ``seconds``, bytes)."""
    plain: dict[str, Any] = msgspec.to_builtins(outcome)
    for entry, result in zip(plain["results"], outcome.results, strict=True):
        entry |= {
            "name": result.step.name,
            "ok": result.ok,
            "verdict": verdict(result),
            "seconds": result.seconds,
            "driver_bytes": result.driver_bytes,
            "reserved_bytes": result.reserved_bytes,
            "peak_bytes": result.peak_bytes,
            "collectives": result.collectives,
        }
    return plain


def to_markdown(outcome: Outcome, command: str) -> str:
    """A report to keep: what was run, what came out, why."""
    lines = ["# Stock and landfall, side by side", "", f"**{final_line(outcome)}**", ""]
    lines += [f"- command: `{command}`", f"- {machine(outcome)}, Python {platform.python_version()}"]
    lines += [f"- landfall {__version__}; {training(outcome)}"]
    lines += [f"- {line}" for line in (free_line(outcome), "" if outcome.on_gpu else TRIPWIRE) if line]
    lines += ["", *_table(outcome), ""]
    if race := race_lines(outcome):
        lines += [race[0], "", *(f"- {line}" for line in race[1:]), ""]
    lines += ["## Why", "", *(f"{number}. {line}" for number, line in enumerate(cause(outcome), start=1)), ""]
    lines += ["## Checks", ""]
    lines += [f"- {'yes' if c.holds else '**NO**'}: {c.claim}{f' ({c.seen})' if c.seen else ''}" for c in outcome.checks]
    lines += ["", *_failures(outcome)]
    return "\n".join(lines).rstrip() + "\n"


def _table(outcome: Outcome) -> list[str]:
    writers = [writer for writer in WRITERS if any(r.step.writer == writer for r in outcome.results)]
    titles = [writer_title(writer, on_gpu=outcome.on_gpu, about=outcome.about) for writer in writers]
    lines = [_row(["", *titles]), _row(["---"] * (len(writers) + 1))]
    for room in ROOMS:
        for action in ACTIONS:
            found = {r.step.writer: r for r in outcome.results if (r.step.room, r.step.action) == (room, action)}
            if found:
                lines += _block([found[writer] for writer in writers], outcome.on_gpu)
    return lines


def _block(results: list[Result], on_gpu: bool) -> list[str]:
    title = step_title(results[0].step, on_gpu=on_gpu)
    lines = [_row([f"**{title}**", *(f"**{verdict(result)}**" for result in results)])]
    rows = [facts(result, on_gpu=on_gpu) for result in results]
    for label in labels(rows):
        lines.append(_row([label, *(row.get(label, "") for row in rows)]))
    return lines


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _failures(outcome: Outcome) -> list[str]:
    lines = []
    for result in outcome.results:
        if told := trouble(result):
            who = writer_title(result.step.writer, on_gpu=outcome.on_gpu, about=outcome.about)
            lines += [f"### {who}: {step_title(result.step, on_gpu=outcome.on_gpu)}", "", "```", *told, "```", ""]
    return ["## What went wrong", "", *lines] if lines else []
