from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.errors import CheckpointError, DamagedError, HostileFileError
from landfall.format.safetensors import (
    TensorEntry,
    from_torch_dtype,
    lay_out,
    read_header,
    tensor_bytes,
    to_torch_dtype,
)

DTYPES = [
    "BOOL",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]

names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tables = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=8)


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    data = torch.randint(0, 2, (tensor_bytes(dtype, shape),), dtype=torch.uint8)
    return data.view(to_torch_dtype(dtype)).reshape(shape)


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(data: bytes) -> dict[str, TensorEntry]:
    return read_header(lambda offset, num_bytes: data[offset : offset + num_bytes], len(data), "test file")


def entry(start: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(tables)
@settings(max_examples=150, deadline=None)
def test_laid_out_file_is_byte_for_byte_what_safetensors_writes(
    table: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    tensors = {name: random_tensor(*spec) for name, spec in table.items()}
    header, entries = lay_out(table)
    ours = bytearray(header)
    for name, its in entries.items():
        assert its.start == len(ours)
        ours += bytes_of(tensors[name])
        assert its.end == len(ours)
    assert bytes(ours) == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_layout_orders_every_dtype_as_safetensors_does() -> None:
    for order in (DTYPES, DTYPES[::-1]):
        table = {f"{number}": (dtype, (3,)) for number, dtype in enumerate(order)}
        tensors = {name: random_tensor(*spec) for name, spec in table.items()}
        assert safetensors.torch.save(tensors, metadata={"format": "pt"}).startswith(lay_out(table)[0])


def test_layout_does_not_depend_on_the_order_of_names() -> None:
    table = {"b": ("BF16", (2,)), "a": ("BF16", (3, 1)), "c": ("F32", ())}
    assert lay_out(table) == lay_out(dict(reversed(table.items())))


@given(tables)
@settings(max_examples=100, deadline=None)
def test_header_that_safetensors_wrote_is_read_back(table: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    tensors = {name: random_tensor(*spec) for name, spec in table.items()}
    data = safetensors.torch.save(tensors)
    entries = read(data)
    assert entries.keys() == tensors.keys()
    for name, its in entries.items():
        assert (its.dtype, its.shape) == table[name]
        assert data[its.start : its.end] == bytes_of(tensors[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names_go_to_torch_and_back(dtype: str) -> None:
    assert from_torch_dtype(to_torch_dtype(dtype)) == dtype
    assert tensor_bytes(dtype, (3,)) == 3 * to_torch_dtype(dtype).itemsize


def test_dtype_without_a_name_in_the_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        from_torch_dtype(torch.complex128)


HOSTILE: dict[str, tuple[bytes, type[CheckpointError], str]] = {
    "empty": (b"", DamagedError, "too short"),
    "seven bytes": (b"\x02" + b"\0" * 6, DamagedError, "too short"),
    "header longer than the file": (file_of({}, length=3), DamagedError, "ends inside its header"),
    "header of 100 MB and a byte": (file_of({}, length=100_000_001), HostileFileError, "absurdly long"),
    "header of 2**64 - 1": (file_of({}, length=2**64 - 1), HostileFileError, "absurdly long"),
    "no JSON": (file_of(b"{oops}"), DamagedError, "not JSON"),
    "a list": (file_of(b"[]"), DamagedError, "not a JSON object"),
    "spaces first": (file_of(b" {}"), DamagedError, "not a JSON object"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), DamagedError, "not JSON"),
    "lone surrogate": (file_of(b'{"\\ud800": 1}'), DamagedError, "not JSON"),
    "nested without end": (file_of(b'{"a":' * 200_000), DamagedError, "not JSON"),
    "number of 5000 digits": (file_of(b'{"a":' + b"9" * 5000 + b"}"), DamagedError, "not JSON"),
    "same name twice": (
        file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'),
        HostileFileError,
        "occurs twice",
    ),
    "same field twice": (
        file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'),
        HostileFileError,
        "occurs twice",
    ),
    "entry is a number": (file_of({"a": 1}), DamagedError, "malformed"),
    "entry without shape": (
        file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}),
        DamagedError,
        "malformed",
    ),
    "unknown dtype": (file_of({"a": entry(0, 4, "F4")}, b"1234"), CheckpointError, "F4"),
    "dtype is a list": (file_of({"a": entry(0, 4, ["F32"])}, b"1234"), CheckpointError, "dtype"),
    "negative size": (file_of({"a": entry(0, 4, shape=[-1, -1])}, b"1234"), HostileFileError, "shape"),
    "size is true": (file_of({"a": entry(0, 4, shape=[True])}, b"1234"), HostileFileError, "shape"),
    "size is 1.0": (file_of({"a": entry(0, 4, shape=[1.0])}, b"1234"), HostileFileError, "shape"),
    "65 dimensions": (file_of({"a": entry(0, 4, shape=[1] * 65)}, b"1234"), HostileFileError, "shape"),
    "size beyond 63 bits": (file_of({"a": entry(0, 0, shape=[2**63, 0])}), HostileFileError, "shape"),
    "product beyond 64 bits": (
        file_of({"a": entry(0, 0, shape=[2**32, 2**32])}),
        DamagedError,
        "don't fit its shape",
    ),
    "offsets backwards": (file_of({"a": entry(4, 0, shape=[1])}, b"1234"), HostileFileError, "no range"),
    "offsets negative": (file_of({"a": entry(-4, 0)}, b"1234"), HostileFileError, "no range"),
    "three offsets": (
        file_of({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0, 0]}}),
        HostileFileError,
        "no range",
    ),
    "bytes do not fit the shape": (
        file_of({"a": entry(0, 8, shape=[1])}, b"12345678"),
        DamagedError,
        "8 bytes",
    ),
    "end beyond the file": (file_of({"a": entry(0, 8)}, b"1234"), DamagedError, "ends before its tensors"),
    "overlap": (file_of({"a": entry(0, 8), "b": entry(4, 12)}, b"123456789012"), HostileFileError, "overlap"),
    "twice the same bytes": (
        file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"),
        HostileFileError,
        "overlap",
    ),
    "hole at the start": (file_of({"a": entry(4, 8)}, b"12345678"), DamagedError, "no tensor"),
    "hole between": (
        file_of({"a": entry(0, 4), "b": entry(8, 12)}, b"123456789012"),
        DamagedError,
        "no tensor",
    ),
    "bytes left over": (file_of({"a": entry(0, 4)}, b"12345"), DamagedError, "no tensor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_or_damaged_header_is_refused(name: str) -> None:
    data, error, words = HOSTILE[name]
    with pytest.raises(CheckpointError) as refusal:
        read(data)
    assert type(refusal.value) is error
    assert words in str(refusal.value) and "test file" in str(refusal.value)


def test_file_that_shrinks_while_it_is_read_is_refused() -> None:
    data = file_of({"a": entry(0, 4)}, b"1234")
    with pytest.raises(DamagedError):
        read_header(lambda offset, num_bytes: data[:20][offset : offset + num_bytes], len(data))


VALID = safetensors.torch.save({"a.b": torch.ones(2, 3), "c": torch.ones(4, dtype=torch.bfloat16)})


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=3)), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_no_mutation_is_read_that_safetensors_itself_refuses(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(VALID)
    for place, replacement in changes:
        data[place : place + 1] = replacement
    try:
        entries = read(bytes(data))
    except CheckpointError:
        return
    theirs = dict(safetensors.deserialize(bytes(data)))
    assert {name: its.shape for name, its in entries.items()} == {
        name: tuple(info["shape"]) for name, info in theirs.items()
    }
    assert all(data[its.start : its.end] == theirs[name]["data"] for name, its in entries.items())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**65) | st.floats() | st.sampled_from(DTYPES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(names, json_values, max_size=3), st.binary(max_size=24))
@settings(max_examples=300, deadline=None)
def test_any_json_header_is_read_within_the_file_or_refused(header: dict[str, Any], data: bytes) -> None:
    file = file_of(header, data)
    try:
        entries = read(file)
    except CheckpointError:
        return
    assert all(8 <= its.start <= its.end <= len(file) for its in entries.values())
