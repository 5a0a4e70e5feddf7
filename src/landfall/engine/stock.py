"""Checkpoints of stock megatron-core and torch DCP as a source of tensors. They carry no digests."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Container

import torch

from landfall.engine.checkpoint import Chunk
from landfall.engine.contents import TORCH_DIST
from landfall.engine.stage import host_bytes
from landfall.errors import DamagedError, NoCheckpointError
from landfall.format import torch_dist
from landfall.format.index import CHUNK_BYTES, ObjectRecord, TensorRecord
from landfall.format.unpickle import METADATA_LIMIT_BYTES, find_payload, read_metadata
from landfall.store.base import Store


class StockCheckpoint:
    """A torch_dist folder that something else wrote; ``folder`` ends with a slash, or is "" for the store."""

    def __init__(self, store: Store, folder: str = "") -> None:
        self.store, self.place, self._folder = store, store.describe(folder), folder
        name = folder + torch_dist.METADATA
        size = store.size(name)
        if size is None:
            expected = f"a folder with {torch_dist.METADATA}"
            raise NoCheckpointError(
                "There is no torch_dist checkpoint here", where=self.place, expected=expected
            )
        if size > METADATA_LIMIT_BYTES:
            raise DamagedError("The metadata is too long", where=store.describe(name), got=f"{size:,} bytes")
        self._metadata = read_metadata(store.read(name), store.describe(name), folder)
        self._rewritten: dict[str, bytes] = {}

    def tensors(self, part: str, keys: Container[str] | None = None) -> dict[str, list[TensorRecord]]:
        found: dict[str, list[TensorRecord]] = defaultdict(list)
        if part == TORCH_DIST:
            for record in self._metadata.tensors:
                if keys is None or record.key in keys:
                    found[record.key].append(self._locate(record))
        return found

    def objects(self, part: str) -> dict[str, ObjectRecord]:
        return {record.key: record for record in self._metadata.objects}

    def read_common(self) -> bytes:
        """The bytes of common.pt, which megatron-core up to 0.18 writes."""
        name = self._folder + torch_dist.COMMON
        if self.store.size(name) is None:
            raise NoCheckpointError("The checkpoint has no common state", where=self.store.describe(name))
        return self.store.read(name)

    def read_object(self, record: ObjectRecord) -> bytes:
        return self._read(record.file, record.offset, record.length, record.key)

    def chunk_of(self, file: str, offset: int) -> Chunk:
        size = len(self._rewritten[file]) if file in self._rewritten else self.store.size(file)
        if size is None or offset >= size:
            raise DamagedError(
                "A record lies outside of its file", where=f"{self.place}/{file}, offset {offset}"
            )
        start = offset // CHUNK_BYTES * CHUNK_BYTES
        return Chunk(file, start, min(CHUNK_BYTES, size - start))

    def read_chunk(self, chunk: Chunk, into: memoryview, key: str) -> None:
        if chunk.file in self._rewritten:
            into[:] = self._rewritten[chunk.file][chunk.offset : chunk.offset + chunk.length]
        else:
            into[:] = self._read(chunk.file, chunk.offset, chunk.length, key)

    def _locate(self, record: TensorRecord) -> TensorRecord:
        """The record with the place of its bytes filled in (the metadata only knows the frame around them)."""
        assert record.frame is not None
        start, length = record.frame
        place = f"{self.store.describe(record.file)}, offset {start}, tensor {record.key}"
        payload = find_payload(
            lambda offset, size: self._read(record.file, start + offset, size, record.key),
            length,
            record,
            place,
        )
        if payload.is_row_major:
            return _at(record, record.file, start + payload.offset)
        name = f"{record.file}@{start}"
        data = self._read(record.file, start, length, record.key)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        self._rewritten[name] = bytes(host_bytes(tensor.contiguous()))
        return _at(record, name, 0)

    def _read(self, file: str, offset: int, length: int, key: str) -> bytes:
        try:
            return self.store.read(file, offset, length)
        except (FileNotFoundError, EOFError) as error:
            where = f"{self.store.describe(file)}, offset {offset}, tensor {key}"
            raise DamagedError("A file is missing or was cut short", where=where, got=str(error)) from error


def _at(record: TensorRecord, file: str, offset: int) -> TensorRecord:
    return TensorRecord(record.key, record.dtype, record.global_shape, record.box, file, offset, record.frame)
