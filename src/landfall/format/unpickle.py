"""The only place where pickles from disk are read, and only classes on a list are ever made.

Stock checkpoints keep their metadata in a pickle, and a pickle is a program. Ours is read through an
unpickler that knows a handful of harmless classes and refuses everything else before it runs.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from landfall.errors import DamagedError, HostileFileError
from landfall.format.archive import check_archive, open_archive
from landfall.format.index import ObjectRecord, TensorRecord
from landfall.format.names import check_name
from landfall.format.pickle_check import check_pickle
from landfall.format.shards import Box
from landfall.format.torch_dist import dtype_name

METADATA_LIMIT_BYTES = 1 << 30
_ERRORS = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    LookupError,
    NotImplementedError,
    RecursionError,
    MemoryError,
    struct.error,
)
"""What a broken pickle makes an unpickler raise."""


class _Dropped:
    """Stands for what is of no use here (plans of the writer): takes any state and keeps none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_METADATA_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _Dropped,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp_metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
}
_DROPPED_MODULES = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return _METADATA_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith(_DROPPED_MODULES):
            return _Dropped
        raise HostileFileError(
            "The metadata asks for a class that no checkpoint needs",
            got=f"{module}.{name}",
            do="do not load this checkpoint with other tools: they would run its code",
        )


@dataclass(frozen=True)
class StockMetadata:
    """A stock ``.metadata`` as records. ``frame`` is set, ``offset`` is that of the frame, not of the data."""

    tensors: list[TensorRecord]
    objects: list[ObjectRecord]


def read_metadata(data: bytes, place: str, folder: str = "") -> StockMetadata:
    """Read ``.metadata`` of torch DCP or megatron-core; files get ``folder`` in front of their names."""
    check_pickle(data, place)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, dcp_metadata.Metadata):
            raise DamagedError(
                "This is not the metadata of a checkpoint", where=place, got=str(type(metadata))
            )
        return _to_records(metadata, folder)
    except HostileFileError as error:
        raise HostileFileError(error.what, where=place, got=error.got, do=error.do) from error
    except _ERRORS as error:
        raise DamagedError("The metadata can't be read", where=place, got=repr(error)) from error


def _to_records(metadata: dcp_metadata.Metadata, folder: str) -> StockMetadata:
    tensors, objects = [], []
    storage = metadata.storage_data
    by_place = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp_metadata.BytesStorageMetadata):
            info = by_place[key, ()]
            objects.append(ObjectRecord(key, _inside(info.relative_path, folder), info.offset, info.length))
            continue
        for chunk in entry.chunks:
            info = by_place[key, tuple(chunk.offsets)]
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            dtype, file = dtype_name(entry.properties.dtype), _inside(info.relative_path, folder)
            frame = (info.offset, info.length)
            tensors.append(TensorRecord(key, dtype, tuple(entry.size), box, file, info.offset, frame))
    return StockMetadata(tensors, objects)


def _inside(name: str, folder: str) -> str:
    return folder + check_name(name, folder or "(its folder)")


@dataclass(frozen=True)
class Payload:
    """Where the bytes of a tensor lie in its ``torch.save`` record, relative to the record's begin."""

    offset: int
    num_bytes: int
    is_row_major: bool
    """False when the tensor was saved with other strides; then only torch.load reads it rightly."""


def find_payload(
    read_at: Callable[[int, int], bytes], length: int, record: TensorRecord, place: str
) -> Payload:
    """Look into a ``torch.save`` record without loading it; ``read_at(offset, n)`` reads within the record."""
    try:
        with open_archive(cast(IO[bytes], _Window(read_at, length)), length, place) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            program = archive.read(names["data.pkl"])
            check_pickle(program, place)
            size, stride, start, dtype = _TensorUnpickler(io.BytesIO(program)).load()
            info = archive.getinfo(names["data/0"])
    except (zipfile.BadZipFile, *_ERRORS, struct.error) as error:
        raise DamagedError("A record is not a saved tensor", where=place, got=repr(error)) from error
    if info.compress_type != zipfile.ZIP_STORED or tuple(size) != record.box.sizes or dtype != record.dtype:
        raise DamagedError(
            "A record is not the tensor that the metadata says",
            where=place,
            got=f"{dtype} {list(size)}",
            expected=f"{record.dtype} {list(record.box.sizes)}",
        )
    name_bytes, extra_bytes = struct.unpack("<HH", read_at(info.header_offset + 26, 4))
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    dense = all(got == want or n == 1 for got, want, n in zip(stride, strides, size, strict=True))
    whole = info.file_size == math.prod(size) * getattr(torch, dtype).itemsize
    return Payload(
        info.header_offset + 30 + name_bytes + extra_bytes, info.file_size, dense and whole and not start
    )


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}
"""The names under which ``torch.save`` pickles a storage, and its dtype ("": said elsewhere)."""


class _TensorUnpickler(pickle.Unpickler):
    """Reads the data.pkl of a saved tensor into (size, stride, storage offset, dtype name)."""

    def persistent_load(self, pid: Any) -> Any:
        return pid[1]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return lambda storage, start, size, stride, *rest: (size, stride, start, storage)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return lambda storage, start, size, stride, grad, hooks, dtype, *rest: (
                size, stride, start, dtype_name(dtype),
            )  # fmt: skip
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise HostileFileError("A record asks for a class that no tensor needs", got=f"{module}.{name}")


class _Window(io.RawIOBase):
    """A record as a file of its own, for zipfile."""

    def __init__(self, read_at: Callable[[int, int], bytes], length: int) -> None:
        self._read_at, self._length, self._position = read_at, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size is None or size < 0 else min(size, left)
        data = self._read_at(self._position, size) if size else b""
        self._position += len(data)
        return data


def load_object(data: bytes, place: str) -> Any:
    """A ``torch.save`` archive of plain values and tensors (common.pt, objects), nothing else in it."""
    import argparse
    import types

    try:
        check_archive(io.BytesIO(data), len(data), place)
        with torch.serialization.safe_globals([argparse.Namespace, types.SimpleNamespace]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise HostileFileError(
            "An object asks for more than plain values", where=place, got=reason
        ) from error
    except (RuntimeError, zipfile.BadZipFile, *_ERRORS) as error:
        raise DamagedError("An object can't be read", where=place, got=str(error).split("\n")[0]) from error
