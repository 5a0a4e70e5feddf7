"""The outcome as a Markdown report and as one JSON object."""

from __future__ import annotations

import platform
from typing import Any

import msgspec

from landfall import __version__
from landfall.repro.cause import TRIPWIRE, cause
from landfall.repro.outcome import Check, Outcome
from landfall.repro.table import final_line
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


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Everything measured, with what follows from it for each step (``verdict``, ``seconds``, bytes)."""
    plain: dict[str, Any] = msgspec.to_builtins(outcome)
    for entry, result in zip(plain["results"], outcome.results, strict=True):
        del entry["step"]  # its folders are gone
        entry |= {
            "name": result.step.name,
            "writer": result.step.writer,
            "room": result.step.room,
            "action": result.step.action,
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
    if source := source_line(outcome):
        lines += [source, ""]
    if race := race_lines(outcome):
        lines += [race[0], "", *(f"- {line}" for line in race[1:]), ""]
    lines += ["## Why", "", *(f"{number}. {line}" for number, line in enumerate(cause(outcome), start=1)), ""]
    lines += ["## Checks", ""]
    lines += [_check(check) for check in outcome.checks]
    lines += ["", *_failures(outcome)]
    return "\n".join(lines).rstrip() + "\n"


def _check(check: Check) -> str:
    seen = f" ({check.seen})" if check.seen else ""
    return f"- {'yes' if check.holds else '**NO**'}: {check.claim}{seen}"


def _table(outcome: Outcome) -> list[str]:
    heads = titles(outcome)
    lines = [_row(["", *heads]), _row(["---"] * (len(heads) + 1))]
    for block in blocks(outcome):
        title = step_title(block[0].step, on_gpu=outcome.on_gpu)
        lines.append(_row([f"**{title}**", *(f"**{verdict(result)}**" for result in block)]))
        rows = [facts(result, on_gpu=outcome.on_gpu) for result in block]
        lines += [_row([label, *(row.get(label, "") for row in rows)]) for label in labels(rows)]
    return lines


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _failures(outcome: Outcome) -> list[str]:
    lines = []
    for result in outcome.results:
        if told := trouble(result):
            lines += [f"### {full_title(result, outcome)}", "", "```", *told, "```", ""]
    return ["## What went wrong", "", *lines] if lines else []
