"""The folders of a run, named as ms-swift names them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from landfall.errors import NoCheckpointError, UsageError
from landfall.format.manifest import NAME
from landfall.format.torch_dist import METADATA

TRACKER = "latest_checkpointed_iteration.txt"


def new_run_folder(save: Path, add_version: bool) -> Path:
    """``<save>/v{n}-<time>``, one more than the highest n there; ``save`` itself without add_version.

    Rank 0 makes it and tells the others. Raises UsageError when the folder can't be made.
    """
    if not add_version:
        return _make(save)
    taken = [int(found.group(1)) for name in _names(save) if (found := re.match(r"v(\d+)-", name))]
    return _make(save / f"v{max(taken, default=-1) + 1}-{time.strftime('%Y%m%d-%H%M%S')}")


@dataclass(frozen=True)
class StockFolder:
    """A checkpoint of stock megatron-core: ``iteration`` is its folder inside ``folder``, with a slash."""

    folder: Path
    iteration: str


def find_stock(path: Path) -> StockFolder | None:
    """The stock checkpoint at ``path``; None if there is none, or if it is one of ours (which has digests),
    committed or not."""
    if (path / NAME).exists() or not path.is_dir() or _has_indexes(path):
        return None
    if (path / METADATA).exists():
        _refuse_uncommitted(path)
        return StockFolder(path, "")
    iterations = sorted(found.parent.name for found in path.glob(f"iter_*/{METADATA}"))
    if not iterations:
        return None
    for iteration in iterations:
        _refuse_uncommitted(path / iteration)
    tracker = path / TRACKER
    if not tracker.exists():
        return StockFolder(path, f"{iterations[-1]}/")
    return StockFolder(path, f"{_tracked(tracker, iterations)}/")


def _has_indexes(path: Path) -> bool:
    return any(next(path.glob(f"{folder}__*.lf*-*.index"), None) for folder in ("", "iter_*/"))


def _refuse_uncommitted(folder: Path) -> None:
    """A save of ours that was killed just before its commit looks like a stock checkpoint."""
    ours = [name for name in _names(folder) if re.search(r"\.lf[0-9a-f]{16}-\d+\.", name)]
    if ours:
        raise NoCheckpointError(
            "A save into this folder was never committed, or its manifest is elsewhere",
            where=str(folder),
            got=f"{ours[0]} without {NAME}",
            do="name the checkpoint-N folder that has the manifest, or another checkpoint",
        )


def _tracked(tracker: Path, iterations: list[str]) -> str:
    text = tracker.read_text(errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isdigit() else text
    if name not in iterations:
        raise UsageError(
            "The tracker names a checkpoint that is not there",
            where=str(tracker),
            got=repr(text),
            expected=f"one of {', '.join(iterations)}",
            do="name the iter_ folder itself",
        )
    return name


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(folder, error) from error


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        "The save folder can't be used",
        where=str(folder),
        got=f"{type(error).__name__}: {error.strerror}",
        expected="a folder that can be made and written",
        do="choose another --save, or mend its permissions",
    )
