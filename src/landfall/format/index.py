"""The index file: what one writer wrote in one save, where it lies, and the digests of every byte.

Every writer puts its index beside its data, as msgpack, durable before it reports to rank 0. The manifest
holds the digest of every index, and the indexes hold the digests of all data: a chain from one file.
"""

from __future__ import annotations

import msgspec
import xxhash

from landfall.errors import DamagedError, HostileFileError
from landfall.format.names import check_name
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


LIMIT_BYTES = 1 << 30
"""No index is longer: it has some 100 bytes for a box, and 4 for a MiB."""


def decode_index(data: bytes, place: str) -> Index:
    """Read an index whose digest was already checked; raises DamagedError when it is no index, and
    HostileFileError when it names files elsewhere, or lengths that can't be."""
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError("This is not a landfall index", where=place, got=str(error)) from error
    for extent in index.extents:
        check_name(extent.file, place)
        if min(extent.offset, extent.length) < 0 or len(extent.digests) != -(-extent.length // CHUNK_BYTES):
            raise _impossible(f"{extent.length} bytes at {extent.offset} of {extent.file}", place)
    for records in index.tensors.values():
        for record in records:
            _check_record(record, place)
    keys = set()
    for part, objects in index.objects.items():
        for item in objects:
            check_name(item.file, place)
            if min(item.offset, item.length) < 0 or (part, item.key) in keys:
                raise _impossible(
                    f"{item.key}, {item.length} bytes at {item.offset}, or it is there twice", place
                )
            keys.add((part, item.key))
    return index


def _check_record(record: TensorRecord, place: str) -> None:
    check_name(record.file, place)
    if record.offset < 0 or not record.box.fits(record.global_shape):
        raise _impossible(f"{record.key}: {record.box} of {list(record.global_shape)}", place)


def _impossible(got: str, place: str) -> HostileFileError:
    return HostileFileError("An index describes what can't be", where=place, got=got[:300])


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of ``data``, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def file_name(save_id: str, rank: int, folder: str) -> str:
    """The name of a rank's index file."""
    return f"{folder}__{rank}.{save_id}.index"
