"""Files made to harm whoever opens them: refused with a clear error, and nothing runs or is allocated."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST
from landfall.engine.latest import newest
from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.engine.stock import StockCheckpoint
from landfall.engine.verify import verify
from landfall.errors import CheckpointError, DamagedError, HostileFileError
from landfall.format.index import Extent, Index, ObjectRecord, TensorRecord, decode_index, digest
from landfall.format.manifest import NAME, Manifest, Writer, decode_manifest
from landfall.format.shards import Box
from landfall.format.torch_dist import object_bytes
from landfall.format.unpickle import find_payload, load_object, read_metadata
from landfall.store.local import LocalStore
from tests.crash.job import contents_of, value_in

OUTSIDE = ["../evil", "/etc/passwd", "a/../../evil", "a//b", "./a", "", "a\0b", "..\\evil"]


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint-1"
    save(contents_of(1.0), LocalStore(place), solo_session(), step=1)
    return place


def manifest_of(folder: Path) -> Manifest:
    return decode_manifest((folder / NAME).read_bytes(), str(folder))


def reseal(folder: Path, change: Callable[[Index], Index]) -> None:
    """Change rank 0's index and make every digest above it right again, as an attacker would."""
    manifest = manifest_of(folder)
    writer = manifest.writers[0]
    index = change(decode_index((folder / writer.index).read_bytes(), writer.index))
    (folder / writer.index).write_bytes(index.encode())
    forged = Writer(writer.rank, writer.index, digest(index.encode()).hex(), writer.num_bytes)
    manifest = msgspec.structs.replace(manifest, writers=[forged, *manifest.writers[1:]])
    (folder / NAME).write_bytes(manifest.encode())


@pytest.mark.parametrize("name", OUTSIDE)
def test_path_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    manifest = manifest_of(folder)
    for changed in (
        msgspec.structs.replace(manifest, published=[*manifest.published, name]),
        msgspec.structs.replace(manifest, writers=[Writer(0, name, "00", 1)]),
    ):
        with pytest.raises(HostileFileError, match="outside of its folder"):
            decode_manifest(changed.encode(), "here")
    for index in (
        Index("lf1-1", 0, [Extent(name, 0, 1, [b"x"])], {}, {}),
        Index("lf1-1", 0, [], {"p": [TensorRecord("k", "int8", (1,), Box((0,), (1,)), name, 0)]}, {}),
        Index("lf1-1", 0, [], {}, {"p": [ObjectRecord("k", name, 0, 1)]}),
    ):
        with pytest.raises(HostileFileError, match="outside of its folder"):
            decode_index(index.encode(), "here")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil"])
def test_stock_metadata_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(HostileFileError, match="outside of its folder"):
        StockCheckpoint(LocalStore(tmp_path))


def test_save_over_a_hostile_manifest_touches_nothing_outside(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    manifest = msgspec.structs.replace(manifest_of(folder), published=["../victim"])
    (folder / NAME).write_bytes(manifest.encode())
    save(contents_of(2.0), LocalStore(folder), solo_session(), step=1)
    assert victim.read_text() == "mine" and value_in(folder) == 2.0


def test_code_in_any_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    archive = object_bytes({"x": 1})
    evil = io.BytesIO()
    torch.save({"args": Runs(made)}, evil)
    with pytest.raises(HostileFileError):
        load_object(evil.getvalue(), "common.pt")
    with pytest.raises(HostileFileError):
        read_metadata(pickle.dumps(Runs(made)), ".metadata")
    record = with_entry(archive, "archive/data.pkl", pickle.dumps(Runs(made), protocol=2))
    with pytest.raises(HostileFileError):
        find_payload(reader(record), len(record), a_record(), "record")
    assert not made.exists()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def a_record() -> TensorRecord:
    return TensorRecord("k", "float32", (1,), Box((0,), (1,)), "f", 0, (0, 1))


def with_entry(
    archive: bytes, name: str, data: bytes, method: int = zipfile.ZIP_STORED, times: int = 1
) -> bytes:
    """A torch.save archive with one of its entries replaced, or with one more."""
    into = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(into, "w") as new:
        for entry in old.namelist():
            if entry != name:
                new.writestr(entry, old.read(entry))
        for _ in range(times):
            new.writestr(name, data, compress_type=method)
    return into.getvalue()


def test_zip_bomb_is_refused_before_it_is_unpacked() -> None:
    archive = object_bytes({"x": torch.ones(4)})
    bomb = with_entry(archive, "archive/data/0", bytes(200 << 20), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(HostileFileError, match="is compressed"):
        load_object(bomb, "common.pt")
    with pytest.raises(HostileFileError, match="is compressed"):
        find_payload(reader(bomb), len(bomb), a_record(), "record")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entry_that_is_there_twice_is_refused() -> None:
    twice = with_entry(object_bytes({"x": 1}), "archive/data.pkl", pickle.dumps({}, protocol=2), times=2)
    with pytest.raises(HostileFileError, match="there twice"):
        load_object(twice, "common.pt")


def deep_tuple(depth: int) -> bytes:
    return b"\x80\x02}(" + b")" + b"\x85" * depth + b"K\x01u."


@pytest.mark.parametrize(
    "program",
    [
        deep_tuple(300_000),
        b"\x80\x02]" + b"r\xff\xff\xff\x7f" + b".",
        b"\x80\x02" + b"(" * 300_000 + b"t" * 300_000 + b".",
    ],
    ids=["deep key", "memo of 2^31", "deep marks"],
)
def test_pickle_that_takes_the_process_down_is_refused(program: bytes) -> None:
    with pytest.raises(HostileFileError, match="take the process down"):
        read_metadata(program, ".metadata")
    with pytest.raises(HostileFileError, match="take the process down"):
        load_object(with_entry(object_bytes({"x": 1}), "archive/data.pkl", program), "common.pt")


def test_deeply_nested_manifest_and_index_are_refused() -> None:
    nested = b'{"content": {"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    with pytest.raises(DamagedError):
        decode_manifest(nested, "here")
    with pytest.raises(DamagedError):
        decode_index(b"\x91" * 200_000 + b"\x90", "here")


@pytest.mark.parametrize(
    "extent", [(0, 1 << 60, [b"x"]), (0, -5, []), (-1, 1, [b"x"]), (0, 1, [b"x"] * 1000)], ids=str
)
def test_absurd_lengths_are_refused(extent: tuple[int, int, list[bytes]]) -> None:
    with pytest.raises(HostileFileError, match="what can't be"):
        decode_index(Index("lf1-1", 0, [Extent("f", *extent)], {}, {}).encode(), "here")


def test_data_that_is_longer_than_its_file_costs_no_memory(folder: Path) -> None:
    length = 1 << 42
    claim = Extent("iter_0000001/common.pt", 0, length, [b"x" * 16] * (length >> 22))
    reseal(folder, lambda index: msgspec.structs.replace(index, extents=[claim]))
    with pytest.raises(CheckpointError, match="cut short"):
        Checkpoint(LocalStore(folder)).read_file("iter_0000001/common.pt")


def test_box_that_leaves_its_tensor_or_is_saved_twice_is_refused(folder: Path) -> None:
    box = Box((5,), (1000,))
    outside = TensorRecord("k", "int8", (10,), box, "f", 0)
    with pytest.raises(HostileFileError, match="what can't be"):
        decode_index(Index("lf1-1", 0, [], {"p": [outside]}, {}).encode(), "here")

    def twice(index: Index) -> Index:
        return msgspec.structs.replace(index, tensors={TORCH_DIST: index.tensors[TORCH_DIST] * 2})

    reseal(folder, twice)
    assert "saved twice" in verify(folder).faults[0]
    with pytest.raises(DamagedError, match="saved twice"):
        value_in(folder)


def test_object_that_is_there_twice_is_refused() -> None:
    objects = {"p": [ObjectRecord("k", "f", 0, 1)] * 2}
    with pytest.raises(HostileFileError, match="what can't be"):
        decode_index(Index("lf1-1", 0, [], {}, objects).encode(), "here")


def test_hostile_newest_checkpoint_is_skipped_and_named(folder: Path) -> None:
    newer = folder.parent / "checkpoint-2"
    save(contents_of(2.0), LocalStore(newer), solo_session(), step=2)
    manifest = msgspec.structs.replace(manifest_of(newer), published=["../../evil"])
    (newer / NAME).write_bytes(manifest.encode())
    found = newest(folder.parent)
    assert found.step == 1 and "outside of its folder" in found.skipped[0]


def test_save_id_that_is_a_path_is_refused(folder: Path) -> None:
    with pytest.raises(HostileFileError, match="save_id"):
        decode_manifest(msgspec.structs.replace(manifest_of(folder), save_id="/../x").encode(), "here")


def test_uncommitted_save_is_not_taken_for_a_stock_checkpoint(folder: Path) -> None:
    from landfall.sft.folders import find_stock

    (folder / NAME).unlink()
    assert find_stock(folder) is None and find_stock(folder / "iter_0000001") is None
