"""Faults on purpose: a kill at any step of a save or before any change to the disk, and a store that fails.

Kills come from outside the product: :func:`kill_at_step` watches the steps that the engine says it has
reached, :func:`kill_before_change` stands in front of the system calls by which Python changes files.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from landfall.engine import protocol
from landfall.engine.protocol import Step
from landfall.store.base import Buffer, Room, Store, WriteFile

KILL_AT = "LANDFALL_TEST_KILL_AT"
"""``STEP:n``: the process ends when it reaches that step for the n-th time, from 1. Read by :func:`arm`."""

CHANGES = ("open", "pwrite", "fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
"""The functions of :mod:`os` through which files change (``open`` only when it may create one)."""


def die() -> None:
    """kill -9 to this process: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_step(step: Step, occurrence: int = 1, act: Callable[[], Any] = die) -> None:
    """``act`` when this process reaches ``step`` for the ``occurrence``-th time from now on, from 1."""
    left = occurrence

    def watcher(reached: Step, name: str) -> None:
        nonlocal left
        if reached is step:
            left -= 1
            if left == 0:
                act()

    protocol.watch(watcher)


def arm() -> None:
    """Do what the environment asks for (see KILL_AT); nothing if it asks for nothing."""
    if asked := os.environ.get(KILL_AT):
        name, _, occurrence = asked.partition(":")
        kill_at_step(Step[name], int(occurrence or 1))


class Recorder:
    """Notes the steps that this process reaches while it is open."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, str]] = []

    def __enter__(self) -> Recorder:
        protocol.watch(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        protocol.unwatch(self._note)

    def _note(self, step: Step, name: str) -> None:
        self.steps.append((step, name))


def kill_before_change(number: int, act: Callable[[], Any] = die) -> Callable[[], int]:
    """``act`` before this process changes a file for the ``number``-th time from now on, from 1 (0: never).

    Returns a function that tells how many changes there were. For a process that is thrown away: the
    functions of :mod:`os` stay wrapped.
    """
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if name != "open" or (len(args) > 1 and args[1] & (os.O_CREAT | os.O_TRUNC)):
                count += 1
                if count == number:
                    act()
            return real(*args, **kwargs)

        return change

    for name in CHANGES:
        setattr(os, name, wrap(name))
    return lambda: count


class FaultyStore(Store):
    """A store that raises ``error`` from its operation number ``first`` on, counted from 1.

    ``last`` is the last operation that fails (None: all from ``first`` on). What is counted is everything
    that changes files: opening, writing, making durable, replacing, renaming, removing.
    """

    def __init__(self, store: Store, error: int, first: int, last: int | None = None) -> None:
        self._store, self._error = store, error
        self._first, self._last = first, last
        self.num_operations = 0

    def check(self, name: str) -> None:
        """Count an operation on ``name``; raise if its turn has come."""
        self.num_operations += 1
        if self._first <= self.num_operations and (self._last is None or self.num_operations <= self._last):
            raise OSError(self._error, os.strerror(self._error), self._store.describe(name))

    def describe(self, name: str = "") -> str:
        return self._store.describe(name)

    def open_write(self, name: str) -> WriteFile:
        self.check(name)
        return _FaultyFile(self._store.open_write(name), self, name)

    def put(self, name: str, data: Buffer) -> None:
        self.check(name)
        self._store.put(name, data)

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        return self._store.read_into(name, offset, into)

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def list(self, folder: str = "") -> Iterator[str]:
        return self._store.list(folder)

    def rename(self, old: str, new: str) -> None:
        self.check(old)
        self._store.rename(old, new)

    def remove(self, name: str) -> None:
        self.check(name)
        self._store.remove(name)

    def sync(self) -> None:
        self.check("")
        self._store.sync()

    def room(self) -> Room:
        return self._store.room()


class _FaultyFile(WriteFile):
    def __init__(self, file: WriteFile, store: FaultyStore, name: str) -> None:
        self._file, self._store, self._name = file, store, name

    def write_at(self, offset: int, data: Buffer) -> None:
        self._store.check(self._name)
        self._file.write_at(offset, data)

    def finish(self) -> None:
        self._store.check(self._name)
        self._file.finish()

    def close(self) -> None:
        self._file.close()
