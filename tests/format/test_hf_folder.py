from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.errors import CheckpointError, DamagedError, HostileFileError, NoCheckpointError, UsageError
from landfall.format.hf_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    ExportPlan,
    folder_entries,
    parse_size,
    plan_export,
)
from landfall.format.safetensors import from_torch_dtype

Table = dict[str, tuple[str, tuple[int, ...]]]


def table_of(tensors: dict[str, torch.Tensor]) -> Table:
    return {name: (from_torch_dtype(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(folder: Path, plan: ExportPlan, tensors: dict[str, torch.Tensor]) -> None:
    """What an exporter does with a plan: every file's header and tensors at their places, then the index."""
    for file in plan.files:
        with open(folder / file.name, "wb") as out:
            out.write(file.header)
            for name, entry in file.entries.items():
                out.seek(entry.start)
                out.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            out.truncate(file.num_bytes)
    if plan.index is not None:
        (folder / INDEX_FILE).write_bytes(plan.index)


def weights() -> dict[str, torch.Tensor]:
    return {
        "model.z": torch.rand(10, 10),
        "model.a": torch.rand(30).bfloat16(),
        "model.b": torch.arange(25),
        "head": torch.rand(0, 3),
    }


@given(
    sizes=st.lists(
        # Not empty: huggingface_hub takes two empty tensors for one, as both lie at address 0.
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.integers(1, 40))
    ),
    max_size=st.integers(1, 200),
)
@settings(max_examples=150, deadline=None)
def test_tensors_go_to_the_files_that_huggingface_hub_chooses(
    sizes: list[tuple[torch.dtype, int]], max_size: int
) -> None:
    tensors = {f"t{len(sizes) - i}": torch.zeros(size, dtype=dtype) for i, (dtype, size) in enumerate(sizes)}
    if not tensors:
        return
    theirs = huggingface_hub.split_torch_state_dict_into_shards(tensors, max_shard_size=max_size)
    ours = plan_export(table_of(tensors), max_size)
    assert {file.name: set(file.entries) for file in ours.files} == {
        name: set(tensors) for name, tensors in theirs.filename_to_tensors.items()
    }
    assert (ours.index is not None) is theirs.is_sharded
    if ours.index is not None:
        index = json.loads(ours.index)
        assert index == {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}


@pytest.mark.parametrize("max_shard_size", ["5GB", "0.4KB"])
def test_exported_folder_is_byte_for_byte_what_safetensors_writes(
    max_shard_size: str, tmp_path: Path
) -> None:
    tensors = weights()
    plan = plan_export(table_of(tensors), max_shard_size)
    assert len(plan.files) == (1 if max_shard_size == "5GB" else 2)
    write(tmp_path, plan, tensors)
    for file in plan.files:
        part = {name: tensors[name] for name in file.entries}
        assert (tmp_path / file.name).read_bytes() == safetensors.torch.save(part, metadata={"format": "pt"})


def test_same_weights_give_the_same_plan() -> None:
    assert plan_export(table_of(weights()), "1KB") == plan_export(table_of(weights()), 1000)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("5GB", 5_000_000_000), ("1.5MB", 1_500_000), (" 2 kb ", 2000), ("1TB", 10**12), (77, 77)],
)
def test_sizes_are_powers_of_ten_as_in_huggingface_hub(size: int | str, num_bytes: int) -> None:
    assert parse_size(size) == num_bytes
    if isinstance(size, str):
        from huggingface_hub.serialization._base import parse_size_to_int

        assert parse_size_to_int(size) == num_bytes


@pytest.mark.parametrize(
    "size", ["5GiB", "5", "GB", "-1GB", "0GB", 0, -5, "nanGB", "1e999GB", "٣GB", "9" * 400 + "GB"]
)
def test_size_that_is_none_is_a_usage_error(size: int | str) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        parse_size(size)


def test_export_without_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensors"):
        plan_export({})


@pytest.mark.parametrize("max_shard_size", ["5GB", "0.4KB"])
def test_folder_entries_find_every_tensor_of_a_folder(max_shard_size: str, tmp_path: Path) -> None:
    tensors = weights()
    write(tmp_path, plan_export(table_of(tensors), max_shard_size), tensors)
    found = folder_entries(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        its = found[name]
        data = (tmp_path / its.file).read_bytes()[its.start : its.end]
        assert (its.dtype, its.shape) == table_of(tensors)[name]
        assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_folder_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir(), snapshot.mkdir()
    (blobs / "0123").write_bytes(safetensors.torch.save({"a": torch.ones(2)}))
    os.symlink("../blobs/0123", snapshot / SINGLE_FILE)
    assert folder_entries(snapshot)["a"].shape == (2,)


def index_of(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_files(folder: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "x.safetensors")
    safetensors.torch.save_file({"b": torch.ones(2)}, folder / "y.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "x.safetensors"}, None),
        ({"a": "x.safetensors", "b": "y.safetensors"}, None),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "b is in the index only"),
        ({"b": "x.safetensors"}, "a is in the file only"),
        ({"a": "x.safetensors", "c": "z.safetensors"}, "a file is missing"),
        ({}, "no weight_map"),
        (["x.safetensors"], "no weight_map"),
    ],
)
def test_index_that_contradicts_its_files_is_refused(
    weight_map: Any, words: str | None, tmp_path: Path
) -> None:
    two_files(tmp_path)
    index_of(tmp_path, weight_map)
    if words is None:
        assert folder_entries(tmp_path).keys() == weight_map.keys()
        return
    with pytest.raises(DamagedError, match=words):
        folder_entries(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "..",
        "",
        "config.json",
        "x\0.safetensors",
        "\ud800.safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_index_that_leaves_the_folder_is_refused(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    two_files(tmp_path)
    two_files(folder)
    index_of(folder, {"a": file})
    with pytest.raises(HostileFileError, match="its own folder"):
        folder_entries(folder)


def test_index_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(HostileFileError, match="occurs twice"):
        folder_entries(tmp_path)


def test_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    index_of(tmp_path, {"a": "x.safetensors"})
    with pytest.raises(HostileFileError, match="regular file"):
        folder_entries(tmp_path)


def test_folder_with_two_sets_of_weights_is_refused(tmp_path: Path) -> None:
    two_files(tmp_path)
    index_of(tmp_path, {"a": "x.safetensors"})
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(DamagedError, match="two sets"):
        folder_entries(tmp_path)


def test_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=INDEX_FILE):
        folder_entries(tmp_path)


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_bytes_as_index_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / INDEX_FILE).write_bytes(data)
    with pytest.raises(CheckpointError):
        folder_entries(folder)
