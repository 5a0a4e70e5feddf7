"""The newest checkpoint that can be trusted, whatever a tracker says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from landfall.engine.checkpoint import read_manifest
from landfall.engine.verify import verify
from landfall.errors import CheckpointError, DamagedError, NoCheckpointError
from landfall.format.manifest import NAME
from landfall.format.torch_dist import TRACKER
from landfall.store.local import LocalStore

_PATTERNS = ("", "checkpoint-*", "v*/checkpoint-*", "iter_*")
"""Where checkpoints lie below a path that a user names: itself, in a run folder, in a save folder."""


@dataclass(frozen=True)
class Found:
    """The folder of a checkpoint that verifies, and which newer ones were skipped for which reason: damaged,
    or never committed."""

    folder: Path
    step: int
    save_id: str
    skipped: list[str] = field(default_factory=list)


def newest(path: str | os.PathLike[str]) -> Found:
    """The newest committed checkpoint at or below ``path`` whose every byte verifies.

    A path that is itself a checkpoint is taken or refused, never replaced by another. Raises
    NoCheckpointError when there is none, DamagedError when all are damaged. Reads all data of the one
    that it returns; call it on one rank.
    """
    named = Path(path)
    skipped: list[str] = []
    for folder in _newest_first(named, skipped):
        report = verify(folder, but=(TRACKER,))  # for stock readers: whatever it says changes nothing here
        if report.ok:
            skipped += _unfinished(named, report.step)
            return Found(folder, report.step, report.save_id, skipped)
        skipped.append(f"{folder}: {report.faults[0]}")
        if folder == named:
            break
    if skipped:
        raise DamagedError(
            "No checkpoint here can be trusted",
            where=str(named),
            got="\n".join(skipped),
            do="`landfall verify` shows all damage of one checkpoint; name an older one to load it",
        )
    raise NoCheckpointError(
        "There is no committed checkpoint here",
        where=str(named),
        expected=f"a folder with {NAME}, or one that holds checkpoint-N folders",
        do="check the path; a save that was cut short leaves no checkpoint",
    )


def _newest_first(path: Path, skipped: list[str]) -> Iterator[Path]:
    found: list[tuple[str, int, Path]] = []
    for pattern in _PATTERNS:
        for folder in [path] if not pattern else sorted(path.glob(pattern)):
            if not (folder / NAME).exists():
                continue
            try:
                read = read_manifest(LocalStore(folder))
            except (OSError, CheckpointError) as error:
                skipped.append(f"{folder}: {error}")
                continue
            found.append((read.created, read.step, folder))
        if found and not pattern:
            break
    for _, _, folder in sorted(found, reverse=True):
        yield folder


def _unfinished(path: Path, step: int) -> list[str]:
    """The folders of later steps in which no save was committed."""
    folders = {folder for pattern in _PATTERNS[1:] for folder in path.glob(pattern) if folder.is_dir()}
    return [
        f"{folder}: no save was committed there"
        for folder in sorted(folders)
        if not (folder / NAME).exists() and _step_of(folder) > step
    ]


def _step_of(folder: Path) -> int:
    number = re.search(r"\d+$", folder.name)
    return int(number.group()) if number else -1
