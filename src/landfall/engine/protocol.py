"""The steps of a save, of its undoing and of a removal, by name: the list that the crash tests go through.

:func:`reached` stands in the code after each of them. A kill before or after any step leaves the checkpoint
that was committed before, or the new one, whole; ``tests/crash`` kills at every member of :class:`Step`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Step(Enum):
    """What has just been done, in the order of a save; the value says by whom and how often."""

    BEGUN = "every rank"
    WRITTEN = "every rank: its data has left for the disk and is not durable yet"
    DURABLE = "every rank: its data"
    INDEXED = "every rank: its index is durable"
    REPORTED = "every rank"
    AGREED = "rank 0: everybody's report is there, and they fit together"
    DESCRIBED = "rank 0: the stock metadata is durable"
    INTENDED = "rank 0: the manifest is durable under its staged name"
    SET_ASIDE = "rank 0, for each published file: the committed one has its staged name"
    PUBLISHED = "rank 0, for each published file: the new one has its fixed name"
    VISIBLE = "rank 0: all published names are durable"
    COMMITTED = "rank 0: landfall.json is replaced"
    CLEARED = "rank 0, for each file of older saves: it is gone"
    ANSWERED = "rank 0: the others know"
    RESTORED = "rank 0 after a failure, for each published file: the committed one has its name again"
    UNDONE = "every rank after a failure, for each file of the failed save: it is gone"
    RETIRED = "rank 0, removing a checkpoint: its manifest has another name, so it is none any more"
    DELETED = "rank 0, removing a checkpoint, for each of its files: it is gone"


Watcher = Callable[[Step, str], None]

_watchers: list[Watcher] = []


def reached(step: Step, name: str = "") -> None:
    """Say that ``step`` is done; ``name`` is the file, where a step is done for each of several."""
    for watcher in _watchers:
        watcher(step, name)


def watch(watcher: Watcher) -> None:
    """Call ``watcher`` at every step of this process from now on."""
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Undo :func:`watch`."""
    _watchers.remove(watcher)
