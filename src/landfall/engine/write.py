"""One writer's files of one save: laid out first, then written from front to back with their digests."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from landfall.engine.pulse import Pulse
from landfall.format.index import CHUNK_BYTES, Extent
from landfall.store.base import Buffer, Store, WriteFile

_GATHER_BYTES = 1 << 20
"""Writes smaller than this are joined, so that thousands of small tensors cost few system calls."""


class ExtentWriter:
    """Writes one range of a file from front to back and digests it chunk by chunk."""

    def __init__(self, file: WriteFile, name: str, offset: int, pulse: Pulse | None = None) -> None:
        self._file, self._name, self._start, self._pulse = file, name, offset, pulse
        self._position = self._flushed = offset
        self._pending = bytearray()
        self._chunk = xxhash.xxh3_128()
        self._digests: list[bytes] = []

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._digest(view)
        if len(view) < _GATHER_BYTES:
            self._pending += view
            if len(self._pending) >= _GATHER_BYTES:
                self._flush()
            return
        self._flush()
        self._write_out(view)

    def finish(self) -> Extent:
        """Hand over the last bytes and tell what was written; the file is not yet durable."""
        self._flush()
        length = self._position - self._start
        if length % CHUNK_BYTES:
            self._digests.append(self._chunk.digest())
        return Extent(self._name, self._start, length, self._digests)

    def _digest(self, view: memoryview) -> None:
        for piece in _split(view, CHUNK_BYTES - (self._position - self._start) % CHUNK_BYTES):
            self._chunk.update(piece)
            self._position += len(piece)
            if piece and (self._position - self._start) % CHUNK_BYTES == 0:
                self._digests.append(self._chunk.digest())
                self._chunk.reset()

    def _flush(self) -> None:
        if self._pending:
            self._write_out(self._pending)
            self._pending = bytearray()

    def _write_out(self, data: Buffer) -> None:
        self._file.write_at(self._flushed, data)
        self._flushed += len(data)
        if self._pulse is not None:
            self._pulse.advance(len(data), f"writes {self._name}")


class SaveFiles:
    """The files that one rank writes in one save; :meth:`finish` makes them durable all at once."""

    def __init__(self, store: Store, pulse: Pulse | None = None) -> None:
        self._store, self._pulse = store, pulse
        self._open: dict[str, WriteFile] = {}
        self._tensors: list[Extent] = []
        self.extents: list[Extent] = []

    def file(self, name: str) -> WriteFile:
        if name not in self._open:
            self._open[name] = self._store.open_write(name)
        return self._open[name]

    def put(self, physical: str, name: str, data: Buffer) -> None:
        """Write a whole small file; ``name`` is what it will be called once published."""
        writer = self.writer(physical, name, 0)
        writer.write(data)
        self.finish_extent(writer)

    def writer(self, physical: str, name: str, offset: int) -> ExtentWriter:
        """Write a range of a file; hand the writer to :meth:`finish_extent` in the end."""
        return ExtentWriter(self.file(physical), name, offset, self._pulse)

    def finish_extent(self, writer: ExtentWriter, *, of_tensors: bool = False) -> None:
        """Note what was written; ``of_tensors`` counts for :attr:`tensors_digest`."""
        extent = writer.finish()
        self.extents.append(extent)
        if of_tensors and extent.length:
            self._tensors.append(extent)

    @property
    def tensors_digest(self) -> str:
        """One digest over the bytes of all tensors; "" if there are none."""
        joined = xxhash.xxh3_128()
        for extent in self._tensors:
            joined.update(b"".join(extent.digests))
        return joined.hexdigest() if self._tensors else ""

    def finish(self) -> None:
        for name, file in self._open.items():
            file.finish()
            if self._pulse is not None:
                self._pulse.advance(doing=f"has {name} on the disk")
        self._store.sync()

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def _split(view: memoryview, first: int) -> Iterator[memoryview]:
    """``view`` cut after ``first`` bytes and then every CHUNK_BYTES."""
    yield view[:first]
    for start in range(first, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
