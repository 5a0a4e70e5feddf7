"""Files that stock megatron-core and torch DCP read: ``torch.save`` records end to end, and ``.metadata``.

Layout, as both read it (torch/distributed/checkpoint/filesystem.py, megatron-core
dist_checkpointing/strategies/torch.py):

- ``*.distcp``: records without padding between them, each a complete ``torch.save`` archive;
- ``.metadata``: a pickled DCP ``Metadata`` that says which record holds which box;
- ``common.pt``: what is the same on all ranks (megatron-core up to 0.18);
- ``metadata.json``: names the format, for megatron-core.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from landfall.format.index import ObjectRecord, TensorRecord

METADATA = ".metadata"
COMMON = "common.pt"
CONFIG = "metadata.json"
SUFFIX = ".distcp"
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's note of the newest step, in the folder that holds the iterations."""

CONFIG_BYTES = json.dumps(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
).encode()
"""megatron-core up to 0.16.1 needs all four fields."""


@functools.lru_cache(maxsize=4096)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a tensor of this shape and dtype.

    The bytes themselves are skipped, so that they can be written from wherever they lie. (Their CRC in the
    archive stays 0; torch's reader does not check it, and our digests do.)
    """
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], sink))
    return sink.frame()


class _Sink(io.RawIOBase):
    """Keeps what is written before and after the one stretch that the writer skips."""

    def __init__(self) -> None:
        self._parts = [bytearray()]
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._parts[-1] += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save is expected to skip forward only")
        self._parts.append(bytearray())
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position

    def frame(self) -> tuple[bytes, bytes]:
        if len(self._parts) == 1:  # an empty tensor: nothing was skipped
            return bytes(self._parts[0]), b""
        head, tail = self._parts
        return bytes(head), bytes(tail)


def object_bytes(value: object) -> bytes:
    """A value as a ``torch.save`` archive."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata_bytes(tensors: Iterable[TensorRecord], objects: Iterable[ObjectRecord], folder: str) -> bytes:
    """``.metadata`` for records whose files lie in ``folder``, made of stock classes only."""
    by_key: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in tensors:
        by_key[record.key].append(record)
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, records in by_key.items():
        state[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype_of(records[0].dtype)),
            size=torch.Size(records[0].global_shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(record.box.offsets), torch.Size(record.box.sizes))
                for record in records
            ],
        )
        for record in records:
            assert record.frame is not None, "only framed records are in torch_dist files"
            place = _StorageInfo(record.file.removeprefix(folder), *record.frame)
            storage[MetadataIndex(key, torch.Size(record.box.offsets))] = place
    for item in objects:
        state[item.key] = BytesStorageMetadata()
        place = _StorageInfo(item.file.removeprefix(folder), item.offset, item.length)
        storage[MetadataIndex(item.key)] = place
    return pickle.dumps(Metadata(state_dict_metadata=state, planner_data=None, storage_data=storage))


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`; raises ValueError for what is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype
