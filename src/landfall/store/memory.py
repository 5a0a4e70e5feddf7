"""A store in memory, for tests and rehearsals of the protocol: same contract, nothing on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from landfall.store.base import Buffer, Store, WriteFile


class MemoryFile(WriteFile):
    def __init__(self, data: bytearray, lock: threading.Lock) -> None:
        self._data, self._lock = data, lock

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with self._lock:
            missing = offset + len(view) - len(self._data)
            if missing > 0:
                self._data.extend(bytes(missing))
            self._data[offset : offset + len(view)] = view

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryStore(Store):
    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def describe(self, name: str = "") -> str:
        return f"memory:{name}"

    def open_write(self, name: str) -> WriteFile:
        with self._lock:
            return MemoryFile(self.files.setdefault(name, bytearray()), self._lock)

    def put(self, name: str, data: Buffer) -> None:
        with self._lock:
            self.files[name] = bytearray(data)

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        with self._lock:
            try:
                found = self.files[name][offset : offset + len(into)]
            except KeyError:
                raise FileNotFoundError(2, "No such file", self.describe(name)) from None
        into[: len(found)] = found
        return len(found)

    def size(self, name: str) -> int | None:
        with self._lock:
            return len(self.files[name]) if name in self.files else None

    def list(self, folder: str = "") -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        with self._lock:
            names = [name for name in self.files if name.startswith(prefix)]
        yield from names

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            if old not in self.files:
                raise FileNotFoundError(2, "No such file", self.describe(old))
            self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        with self._lock:
            self.files.pop(name, None)

    def sync(self) -> None:
        pass
