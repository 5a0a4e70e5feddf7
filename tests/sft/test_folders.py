"""Which folders are taken for checkpoints of stock megatron-core, and which run folder comes next."""

from __future__ import annotations

from pathlib import Path

import pytest

from landfall.errors import NoCheckpointError, UsageError
from landfall.sft.folders import StockFolder, find_stock, new_run_folder


def stock(folder: Path, data: str = "__0_0.distcp") -> Path:
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    (folder / data).write_bytes(b"")
    return folder


def test_stock_checkpoint_is_found_by_folder_tracker_or_newest(tmp_path: Path) -> None:
    for step in (10, 20):
        stock(tmp_path / f"iter_{step:07d}")
    assert find_stock(tmp_path / "iter_0000010") == StockFolder(tmp_path / "iter_0000010", "")
    assert find_stock(tmp_path) == StockFolder(tmp_path, "iter_0000020/")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert find_stock(tmp_path) == StockFolder(tmp_path, "iter_0000010/")


@pytest.mark.parametrize("tracker", ["", "30", "release"])
def test_tracker_that_names_nothing_is_refused(tmp_path: Path, tracker: str) -> None:
    stock(tmp_path / "iter_0000010")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(UsageError, match="iter_0000010"):
        find_stock(tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_save_of_ours_without_commit_is_not_taken_for_a_stock_checkpoint(
    tmp_path: Path, inside: bool
) -> None:
    iteration = stock(tmp_path / "checkpoint-5" / "iter_0000005", "__0_0.lf0123456789abcdef-3.distcp")
    with pytest.raises(NoCheckpointError, match="never committed"):
        find_stock(iteration if inside else iteration.parent)


def test_run_folders_are_numbered_on(tmp_path: Path) -> None:
    first, second = new_run_folder(tmp_path, True), new_run_folder(tmp_path, True)
    assert first.name.startswith("v0-") and second.name.startswith("v1-")
    assert new_run_folder(tmp_path / "plain", False) == tmp_path / "plain"
