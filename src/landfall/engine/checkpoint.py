"""An opened checkpoint: its records by key, and verified reading of any range of its files."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from landfall.errors import DamagedError, NoCheckpointError
from landfall.format.index import CHUNK_BYTES, Extent, Index, ObjectRecord, TensorRecord, decode_index, digest
from landfall.format.index import LIMIT_BYTES as INDEX_LIMIT_BYTES
from landfall.format.manifest import LIMIT_BYTES, NAME, Manifest, decode_manifest, staged_name
from landfall.store.base import Store


class Source(Protocol):
    """Where tensors can be loaded from: a checkpoint of ours, of stock megatron-core, of Hugging Face."""

    place: str

    def tensors(self, part: str, keys: Container[str] | None = None) -> dict[str, list[TensorRecord]]:
        """The records of the tensors ``keys`` (all if None) of one format (see engine.contents), by key."""
        ...

    def chunk_of(self, file: str, offset: int) -> Chunk:
        """The piece of ``file`` around ``offset`` that is read and verified as one."""
        ...

    def read_chunk(self, chunk: Chunk, into: memoryview, key: str) -> None:
        """Read and verify a chunk; raises DamagedError naming file, offset and the tensor ``key``."""
        ...


@dataclass(frozen=True, order=True)
class Chunk:
    """A range of a file with its xxh3-128 (b"" where the writer gave none)."""

    file: str
    offset: int
    length: int
    digest: bytes = b""


class Checkpoint:
    """A committed checkpoint. Opening reads and verifies the manifest and the indexes, no data."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.place = store.describe()
        self.manifest = read_manifest(store)
        self.indexes = [
            _read_index(store, self.manifest, position) for position in range(len(self.manifest.writers))
        ]
        self._extents: dict[str, list[Extent]] = defaultdict(list)
        for extent in self.extents():
            if extent.length:  # an empty tensor begins where the next one does
                self._extents[extent.file].append(extent)
        for extents in self._extents.values():
            extents.sort(key=lambda extent: extent.offset)

    def extents(self) -> list[Extent]:
        return [extent for index in self.indexes for extent in index.extents]

    def tensors(self, part: str, keys: Container[str] | None = None) -> dict[str, list[TensorRecord]]:
        found: dict[str, list[TensorRecord]] = defaultdict(list)
        for index in self.indexes:
            for record in index.tensors.get(part, []):
                if keys is None or record.key in keys:
                    found[record.key].append(record)
        return found

    def objects(self, part: str) -> dict[str, ObjectRecord]:
        return {record.key: record for index in self.indexes for record in index.objects.get(part, [])}

    def physical(self, file: str) -> str:
        """The name that a file of this generation has now (see format.manifest)."""
        staged = staged_name(file, self.manifest.save_id)
        return staged if self.store.size(staged) is not None else file

    def chunk_of(self, file: str, offset: int) -> Chunk:
        extents = self._extents.get(file, [])
        at = bisect.bisect_right(extents, offset, key=lambda extent: extent.offset) - 1
        if at < 0 or offset >= extents[at].offset + extents[at].length:
            raise DamagedError(
                "The index points outside of what was written", where=f"{file}, offset {offset}"
            )
        extent = extents[at]
        number = (offset - extent.offset) // CHUNK_BYTES
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, extent.length - start)
        return Chunk(file, extent.offset + start, length, extent.digests[number])

    def read_chunk(self, chunk: Chunk, into: memoryview, key: str) -> None:
        where = f"{self.store.describe(self.physical(chunk.file))}, offset {chunk.offset}, tensor {key}"
        try:
            got = self.store.read_into(self.physical(chunk.file), chunk.offset, into)
        except FileNotFoundError as error:
            raise DamagedError("A file of the checkpoint is missing", where=where) from error
        if got != chunk.length:
            expected = f"{chunk.length:,} bytes from there"
            raise DamagedError("A file was cut short", where=where, got=f"{got:,} bytes", expected=expected)
        if (found := digest(into)) != chunk.digest:
            raise DamagedError(
                "Bytes on disk are not the bytes that were saved",
                where=where,
                got=f"xxh3-128 {found.hex()} over {chunk.length:,} bytes",
                expected=chunk.digest.hex(),
                do="load another checkpoint; `landfall verify` shows all damage",
            )

    def read_range(self, file: str, offset: int, length: int, key: str) -> bytes:
        """Any range, every byte of it verified."""
        parts, end = [], offset + length
        while offset < end:
            chunk = self.chunk_of(file, offset)
            data = bytearray(chunk.length)
            self.read_chunk(chunk, memoryview(data), key)
            stop = min(end, chunk.offset + chunk.length)
            parts.append(data[offset - chunk.offset : stop - chunk.offset])
            offset = stop
        return b"".join(parts)

    def read_object(self, record: ObjectRecord) -> bytes:
        return self.read_range(record.file, record.offset, record.length, record.key)

    def read_file(self, name: str) -> bytes:
        """A whole small file that the checkpoint's index names; raises NoCheckpointError if it names none."""
        extents = self._extents.get(name)
        if not extents:
            raise NoCheckpointError(f"The checkpoint has no {name}", where=self.place)
        return self.read_range(name, 0, extents[-1].offset + extents[-1].length, name)


def read_manifest(store: Store) -> Manifest:
    """The manifest of a folder; raises NoCheckpointError, DamagedError, HostileFileError."""
    size = store.size(NAME)
    if size is None:
        raise NoCheckpointError(
            "There is no committed checkpoint here",
            where=store.describe(),
            expected=f"a folder with {NAME}",
            do="name a checkpoint-N folder, or the folder that holds them",
        )
    if size > LIMIT_BYTES:
        raise DamagedError(
            "The manifest is too long to be one", where=store.describe(NAME), got=f"{size:,} bytes"
        )
    return decode_manifest(store.read(NAME), store.describe(NAME))


def _read_index(store: Store, manifest: Manifest, position: int) -> Index:
    writer = manifest.writers[position]
    place = store.describe(writer.index)
    if (size := store.size(writer.index) or 0) > INDEX_LIMIT_BYTES:
        raise DamagedError("An index file is too long to be one", where=place, got=f"{size:,} bytes")
    try:
        data = store.read(writer.index)
    except FileNotFoundError as error:
        raise DamagedError(f"Rank {writer.rank}'s index file is missing", where=place) from error
    if (found := digest(data).hex()) != writer.digest:
        raise DamagedError(
            f"Rank {writer.rank}'s index file was changed", where=place, got=found, expected=writer.digest
        )
    index = decode_index(data, place)
    if index.save_id != manifest.save_id:
        raise DamagedError(
            "An index of another save", where=place, got=index.save_id, expected=manifest.save_id
        )
    return index
