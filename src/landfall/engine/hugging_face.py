"""The weights of a Hugging Face folder as a source of tensors. Such folders carry no digests."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from landfall.engine.checkpoint import Chunk
from landfall.engine.contents import SAFETENSORS
from landfall.errors import DamagedError
from landfall.format.hf_folder import folder_entries
from landfall.format.index import CHUNK_BYTES, TensorRecord
from landfall.format.safetensors import to_torch_dtype
from landfall.format.shards import whole
from landfall.format.torch_dist import dtype_name
from landfall.store.local import LocalStore


class HuggingFaceFolder:
    """A local folder with model.safetensors, or several and their index. Headers are checked on opening."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.place = str(folder)
        self._store = LocalStore(folder)
        self._entries = folder_entries(Path(folder))

    def tensors(self, part: str, keys: Container[str] | None = None) -> dict[str, list[TensorRecord]]:
        if part != SAFETENSORS:
            return {}
        return {
            name: [
                TensorRecord(
                    name,
                    dtype_name(to_torch_dtype(entry.dtype)),
                    entry.shape,
                    whole(entry.shape),
                    entry.file,
                    entry.start,
                )
            ]
            for name, entry in self._entries.items()
            if keys is None or name in keys
        }

    def chunk_of(self, file: str, offset: int) -> Chunk:
        size = self._store.size(file) or 0
        start = offset // CHUNK_BYTES * CHUNK_BYTES
        return Chunk(file, start, min(CHUNK_BYTES, size - start))

    def read_chunk(self, chunk: Chunk, into: memoryview, key: str) -> None:
        got = self._store.read_into(chunk.file, chunk.offset, into)
        if got != chunk.length:
            where = f"{self._store.describe(chunk.file)}, offset {chunk.offset}, tensor {key}"
            raise DamagedError("A file was cut short while it was read", where=where, got=f"{got:,} bytes")
