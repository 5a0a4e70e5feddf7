"""Broken and random bytes: every reader answers with a value or a CheckpointError, never with anything else."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.errors import CheckpointError
from landfall.format.index import TensorRecord, decode_index
from landfall.format.manifest import NAME, decode_manifest
from landfall.format.shards import Box
from landfall.format.torch_dist import object_bytes
from landfall.format.unpickle import find_payload, load_object, read_metadata
from landfall.store.memory import MemoryStore
from tests.crash.job import contents_of


@functools.cache
def samples() -> dict[str, bytes]:
    """One good file of each kind."""
    store = MemoryStore()
    save(contents_of(1.0), store, solo_session(), step=1)
    index = next(name for name in store.files if name.endswith(".index") and "metadata" not in name)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"a": torch.ones(3, 4), "b": 5}, checkpoint_id=folder, no_dist=True)
        metadata = (Path(folder) / ".metadata").read_bytes()
    return {
        "manifest": bytes(store.files[NAME]),
        "index": bytes(store.files[index]),
        "metadata": metadata,
        "record": object_bytes(torch.ones(3, 4)),
        "common": object_bytes({"step": 5, "nested": [1, {"a": torch.ones(3)}]}),
    }


def read_record(data: bytes, place: str) -> object:
    record = TensorRecord("k", "float32", (3, 4), Box((0, 0), (3, 4)), "f", 0, (0, len(data)))
    return find_payload(lambda offset, length: data[offset : offset + length], len(data), record, place)


READERS: dict[str, Callable[[bytes, str], object]] = {
    "manifest": decode_manifest,
    "index": decode_index,
    "metadata": read_metadata,
    "record": read_record,
    "common": load_object,
}


@st.composite
def broken(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with bytes changed, put in, or left out; or no file at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=400))
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        data[start:end] = draw(st.binary(max_size=12))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_broken_bytes_give_a_value_or_a_clear_error(kind: str, data: st.DataObject) -> None:
    content = data.draw(broken(samples()[kind]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, about names that are there twice
        try:
            READERS[kind](content, "here")
        except CheckpointError as error:
            assert "here" in str(error)
