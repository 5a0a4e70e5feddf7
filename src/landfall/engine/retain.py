"""Which checkpoints of a run are kept, and how one is removed so that half of it is never taken for one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from landfall.engine.commit import read_committed
from landfall.engine.protocol import Step, reached
from landfall.format import torch_dist
from landfall.format.manifest import NAME
from landfall.store.local import LocalStore

RETIRED = f"{NAME}.removed"
"""What the manifest is called while its checkpoint is being removed. It goes last."""


@dataclass(frozen=True)
class Policy:
    """What to keep. The newest checkpoint and the best one always are, whatever else is asked for."""

    limit: int | None = None
    """The most checkpoints, newest and best among them; None: no limit."""
    keep_every: int | None = None
    """With it, of the older ones only those are kept whose step is a multiple."""


def retain(folder: Path, policy: Policy, best: int | None = None) -> list[Path]:
    """Remove checkpoint-N folders in ``folder`` that ``policy`` does not keep; returns them, oldest first.

    Call it on one rank, after a commit: what is being saved has no manifest yet, is not counted and not
    touched. ``best`` is the step of the best one. Finishes removals that were cut short, too.
    """
    committed = {
        step: path for step, path in _folders(folder) if read_committed(LocalStore(path)) is not None
    }
    for step, path in _folders(folder):
        if step < max(committed, default=0) and _is_half_removed(path):
            remove(path)
    unwanted = [committed[step] for step in _unwanted(sorted(committed), policy, best)]
    for path in unwanted:
        remove(path)
    return unwanted


def remove(path: Path) -> None:
    """Remove a checkpoint: its manifest's name first, durably, so that it is none from then on."""
    store = LocalStore(path)
    if store.size(NAME) is not None:
        store.rename(NAME, RETIRED)
        store.sync()
    reached(Step.RETIRED, NAME)
    for name in sorted(store.list(), key=_removal_order):
        store.remove(name)
        reached(Step.DELETED, name)
    _remove_folder(path)


def _is_half_removed(path: Path) -> bool:
    """Whether a removal was cut short here: what is left is marked, or there is nothing but folders."""
    names = set(LocalStore(path).list())
    return NAME not in names and (RETIRED in names or not names)


def _unwanted(steps: list[int], policy: Policy, best: int | None) -> list[int]:
    """The steps to remove, of ``steps`` in rising order."""
    if not steps:
        return []
    always = {steps[-1], best} & set(steps)
    older = [step for step in steps if step not in always]
    if policy.keep_every is not None:
        older = [step for step in older if step % policy.keep_every == 0]
    if policy.limit is not None:
        room = max(policy.limit - len(always), 0)
        older = older[len(older) - room :] if room else []
    kept = always | set(older)
    return [step for step in steps if step not in kept]


def _removal_order(name: str) -> tuple[int, str]:
    """The metadata of stock readers right after ours, the mark that says what goes on here last."""
    if name == RETIRED:
        return 2, name
    is_metadata = name.rpartition("/")[2] in (torch_dist.METADATA, torch_dist.CONFIG)
    return (0 if is_metadata else 1), name


def _folders(folder: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return sorted((int(match.group(1)), path) for match, path in found if match and path.is_dir())


def _remove_folder(path: Path) -> None:
    for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
        folder.rmdir()
    path.rmdir()
