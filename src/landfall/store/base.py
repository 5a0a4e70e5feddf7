"""Bytes that last: the contract between the engine and where checkpoints lie.

Names are relative paths with ``/``. A store makes three promises on which the one commit of a save rests:

1. when :meth:`WriteFile.finish` returns, the bytes of the file survive a power cut;
2. :meth:`Store.put` replaces a file atomically (a reader sees the old bytes or the new, never a mixture)
   and durably;
3. after :meth:`Store.sync`, creations, renames and removals made before it survive a power cut.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

Buffer = bytes | bytearray | memoryview

TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
"""The names under which a :meth:`Store.put` may leave a file behind when its process is killed."""


@dataclass(frozen=True)
class Room:
    """How much can still be written; None where nothing limits it, or nobody knows."""

    free_bytes: int | None = None
    """In all."""
    file_bytes: int | None = None
    """In one file: the process's limit."""


class WriteFile(ABC):
    """A file that is being written. Leaving the ``with`` block without :meth:`finish` only closes it."""

    @abstractmethod
    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``; other writers may be writing other ranges of the file."""

    @abstractmethod
    def finish(self) -> None:
        """Make what was written here durable and close."""

    @abstractmethod
    def close(self) -> None:
        """Close without any promise; harmless after :meth:`finish`."""

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Store(ABC):
    """A folder of files. Errors are OSErrors with errno and the name in ``filename``."""

    @abstractmethod
    def describe(self, name: str = "") -> str:
        """The place of a file, for people."""

    @abstractmethod
    def open_write(self, name: str) -> WriteFile:
        """Open a file for writing, creating it and its folders; bytes already in it stay."""

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Create or replace a small file, atomically and durably."""

    @abstractmethod
    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``; returns how many bytes there were (fewer at the end of file)."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes in the file; None when there is none."""

    @abstractmethod
    def list(self, folder: str = "") -> Iterator[str]:
        """The names of all files below ``folder``, in no order."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Move a file, atomically replacing what has the name ``new``; durable after :meth:`sync`."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, and folders that become empty; nothing happens when it is not there."""

    @abstractmethod
    def sync(self) -> None:
        """Make creations, renames and removals durable."""

    def room(self) -> Room:
        """What can be written here now."""
        return Room()

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``offset`` (to the end when None); raises FileNotFoundError, EOFError."""
        if length is None:
            size = self.size(name)
            if size is None:
                raise FileNotFoundError(2, "No such file", self.describe(name))
            length = size - offset
        into = bytearray(length)
        got = self.read_into(name, offset, memoryview(into))
        if got != length:
            raise EOFError(f"{self.describe(name)} ends {length - got} bytes too early")
        return bytes(into)
