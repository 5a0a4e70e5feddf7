"""What a rank tells whoever started it: one JSON object a line, in a file of its own."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from landfall.repro.cases import Launch
from landfall.repro.outcome import About, Attempt, Event, Failure, Frame


class Orders(msgspec.Struct, frozen=True):
    """What the ranks of one launch are told, in ``orders.json`` of their folder."""

    launch: Launch
    on_gpu: bool


def read_orders(folder: Path) -> Orders:
    return msgspec.json.decode((folder / "orders.json").read_bytes(), type=Orders)


def write_orders(folder: Path, orders: Orders) -> None:
    (folder / "orders.json").write_bytes(msgspec.json.encode(orders))


class Diary:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the rank lives
        self._step = ""

    def phase(self, phase: str, step: str = "", free_bytes: int = -1) -> None:
        """What begins now; with ``step`` also for which step, until another is named."""
        self._step = step or self._step
        self._write(Event(phase, self._step, free_bytes=free_bytes))

    def about(self, about: About) -> None:
        self._write(Event("about", about=about))

    def attempt(self, attempt: Attempt) -> None:
        self._write(Event(attempt.ended, self._step, attempt=attempt))

    def broken(self, error: BaseException) -> None:
        self._write(Event("broken", self._step, broken=failure_of(error)))

    def _write(self, event: Event) -> None:
        os.write(self._file.fileno(), msgspec.json.encode(event) + b"\n")


class DiaryReader:
    """The reading side: the lines that were added since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [msgspec.json.decode(line, type=Event) for line in lines]


def failure_of(error: BaseException) -> Failure:
    """An exception with its place. One without a message gives its representation."""
    return Failure(type(error).__name__, str(error).strip() or repr(error), frames_of(error.__traceback__))


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """From the outermost to the innermost."""
    entries = traceback.extract_tb(trace)
    return [Frame(shorten(entry.filename), entry.lineno or 0, entry.name) for entry in entries]


def shorten(file: str) -> str:
    """A source file's path from the package on."""
    for folder in ("/site-packages/", "/dist-packages/", "/src/"):
        if folder in file:
            return file.rpartition(folder)[2]
    for package in ("megatron/core/", "torch/", "landfall/"):
        if f"/{package}" in file:
            return package + file.rpartition(f"/{package}")[2]
    return file
