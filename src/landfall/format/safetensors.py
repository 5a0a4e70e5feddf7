"""One safetensors file, byte by byte: its header written as safetensors itself writes it, and read with care.

The file is 8 bytes (the header's length, little-endian), the header (JSON, padded with spaces so that
data starts at a multiple of 8), then the data of all tensors without holes. Larger dtypes come first, ties go
by name, as in safetensors' own writer: the same weights give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from landfall.errors import CheckpointError, DamagedError, HostileFileError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""

_MAX_DIMENSIONS = 64
_METADATA = "__metadata__"
_AGAIN = "copy or export the file again"

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""dtype names of safetensors and torch, in the order that decides which tensors come last in a file."""

_RANK = {dtype: rank for rank, dtype in enumerate(_TORCH_NAMES)}
_SAFETENSORS_NAMES = {torch_name: dtype for dtype, torch_name in _TORCH_NAMES.items()}
_ITEM_BYTES = dict.fromkeys(_TORCH_NAMES, 1) | dict.fromkeys(("I16", "U16", "F16", "BF16"), 2)
_ITEM_BYTES |= dict.fromkeys(("I32", "U32", "F32"), 4) | dict.fromkeys(("C64", "F64", "I64", "U64"), 8)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its bytes, row-major and little-endian, are [start, end) of the whole file."""

    dtype: str
    """safetensors' name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    end: int


def to_torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of safetensors' name for it."""
    import torch

    return getattr(torch, _TORCH_NAMES[dtype])


def from_torch_dtype(dtype: torch.dtype) -> str:
    """safetensors' name for a torch dtype; CheckpointError if the format has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in _SAFETENSORS_NAMES:
        raise CheckpointError(
            f"safetensors files can't hold {dtype}", expected=f"one of {', '.join(_SAFETENSORS_NAMES)}"
        )
    return _SAFETENSORS_NAMES[name]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes. ``dtype`` is safetensors' name."""
    return math.prod(shape) * _ITEM_BYTES[dtype]


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """The first bytes of a file of ``tensors`` (name -> safetensors dtype, shape), and where each lies.

    The entries come in file order; the file ends where the last one ends (or with the header).
    """
    order = sorted(tensors, key=lambda name: (-_RANK[tensors[name][0]], name.encode()))
    sizes = {name: tensor_bytes(*tensors[name]) for name in order}
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + sizes[name]]}
        offset += sizes[name]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError("too many tensors for one safetensors file", got=f"{len(text)} header bytes")
    start = 8 + len(text)
    entries: dict[str, TensorEntry] = {}
    for name in order:
        entries[name] = TensorEntry(*tensors[name], start, start + sizes[name])
        start += sizes[name]
    return len(text).to_bytes(8, "little") + text, entries


def read_header(
    read_at: Callable[[int, int], bytes], file_size: int, place: str = "safetensors file"
) -> dict[str, TensorEntry]:
    """The tensors of a file, in file order, after checking that the header is consistent with the file.

    ``read_at(offset, num_bytes)`` reads the file; ``place`` names it in errors. Only the header is read.
    Raises DamagedError when header and file contradict each other, HostileFileError when the header asks for
    what no honest writer asks for, CheckpointError for a dtype that is not supported.
    """
    length_field = read_at(0, 8) if file_size >= 8 else b""
    if len(length_field) != 8:
        raise DamagedError("a file is too short for safetensors", where=place, got=f"{file_size} bytes")
    length = int.from_bytes(length_field, "little")
    if length > MAX_HEADER_BYTES:
        raise HostileFileError(
            "a safetensors header is absurdly long",
            where=place,
            got=f"{length} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    if length > file_size - 8:
        expected = f"at least {8 + length} bytes for the header alone"
        raise DamagedError(
            "a file ends inside its header", where=place, got=f"{file_size} bytes", expected=expected
        )
    fields = parse_json_object(read_at(8, length), place)
    fields.pop(_METADATA, None)
    entries = {name: _entry(name, field, 8 + length, place) for name, field in fields.items()}
    return _checked_layout(entries, 8 + length, file_size, place)


def parse_json_object(data: bytes, place: str) -> dict[str, Any]:
    """A JSON object whose keys are unique on every level; DamagedError or HostileFileError if it is not."""
    if not data.startswith(b"{"):
        raise DamagedError("not a JSON object", where=place, got=repr(data[:20]), expected="'{' first")
    try:
        return json.loads(data.decode(), object_pairs_hook=lambda pairs: _unique(pairs, place))
    except (ValueError, RecursionError) as error:
        raise DamagedError("not JSON", where=place, got=str(error) or type(error).__name__) from error


def _unique(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            what = "a name occurs twice, so readers may disagree about what it is"
            raise HostileFileError(what, where=place, got=repr(name))
        name.encode()  # a lone surrogate is no text: ValueError
        found[name] = value
    return found


def _entry(name: str, field: Any, data_start: int, place: str) -> TensorEntry:
    where = f"{place}, tensor {name}"
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(
            "a header entry is malformed", where=where, expected="dtype, shape and data_offsets", do=_AGAIN
        )
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TORCH_NAMES:
        raise CheckpointError(
            "a dtype is not supported",
            where=where,
            got=repr(dtype),
            expected=f"one of {', '.join(_TORCH_NAMES)}",
        )
    if not _are_lengths(shape) or len(shape) > _MAX_DIMENSIONS:
        raise HostileFileError("a shape is not one of a tensor", where=where, got=repr(shape)[:200])
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HostileFileError("offsets are no range of a file", where=where, got=repr(offsets)[:200])
    expected = tensor_bytes(dtype, tuple(shape))
    if offsets[1] - offsets[0] != expected:
        raise DamagedError(
            "a tensor's bytes don't fit its shape",
            where=where,
            got=f"{offsets[1] - offsets[0]} bytes",
            expected=f"{expected} for {dtype} {shape}",
            do=_AGAIN,
        )
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _checked_layout(
    entries: dict[str, TensorEntry], data_start: int, file_size: int, place: str
) -> dict[str, TensorEntry]:
    """The entries in file order, after checking that they cover the data once, without holes."""
    in_order = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end, previous = data_start, "the header"
    for name, entry in in_order.items():
        where = f"{place}, tensor {name}"
        if entry.end > file_size:
            got, expected = f"{file_size} bytes", f"at least {entry.end}"
            raise DamagedError(
                "a file ends before its tensors", where=where, got=got, expected=expected, do=_AGAIN
            )
        if entry.start < end:
            got = f"{previous} ends at {end}, {name} starts at {entry.start}"
            raise HostileFileError("tensors overlap", where=where, got=got)
        if entry.start > end:
            got = f"{entry.start - end} bytes before {name}"
            raise DamagedError("bytes belong to no tensor", where=where, got=got, do=_AGAIN)
        end, previous = entry.end, name
    if end != file_size:
        got = f"{file_size - end} bytes at the end"
        raise DamagedError("bytes belong to no tensor", where=place, got=got, do=_AGAIN)
    return in_order
