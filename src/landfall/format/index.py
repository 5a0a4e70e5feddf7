"""The index file: what one writer wrote in one save, where it lies, and the digests of every byte.

Every writer puts its index beside its data, as msgpack, durable before it reports to rank 0. The manifest
holds the digest of every index, and the indexes hold the digests of all data: a chain from one file.
"""

from __future__ import annotations

import msgspec
import xxhash

from landfall.errors import DamagedError
from landfall.format.shards import Box

CHUNK_BYTES = 4 << 20
"""Digests are xxh3-128 over this many bytes: small enough for partial reads, 16 bytes each."""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A range of a file that one writer wrote, with the digest of each CHUNK_BYTES of it, in order."""

    file: str
    offset: int
    length: int
    digests: list[bytes]


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One box of a tensor: its row-major bytes lie at ``offset`` of ``file``.

    ``frame`` is (offset, length) of the torch.save record around them, in torch_dist files.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    file: str
    offset: int
    frame: tuple[int, int] | None = None


class ObjectRecord(msgspec.Struct, frozen=True, array_like=True):
    """A pickled object of a torch_dist checkpoint: ``length`` bytes at ``offset`` of ``file``."""

    key: str
    file: str
    offset: int
    length: int


class Index(msgspec.Struct, frozen=True):
    """All that one rank wrote in one save. ``part`` names in ``tensors`` and ``objects`` are the folders'."""

    save_id: str
    rank: int
    extents: list[Extent]
    tensors: dict[str, list[TensorRecord]]
    objects: dict[str, list[ObjectRecord]]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_index(data: bytes, place: str) -> Index:
    """Read an index whose digest was already checked; raises DamagedError when it is no index."""
    try:
        return msgspec.msgpack.decode(data, type=Index)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedError("This is not a landfall index", where=place, got=str(error)) from error


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of ``data``, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def file_name(save_id: str, rank: int, folder: str) -> str:
    """The name of a rank's index file."""
    return f"{folder}__{rank}.{save_id}.index"
