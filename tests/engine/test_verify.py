"""Every kind of damage is found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from landfall.engine.latest import newest
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.verify import verify
from landfall.errors import DamagedError, NoCheckpointError
from landfall.store.local import LocalStore

from .conftest import make_contents, make_state


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 0x40
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64] if file.stat().st_size > 64 else b"")


def zero(file: Path) -> None:
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 65536] = bytes(len(data[middle : middle + 65536]))
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, cut, zero, Path.unlink], ids=["flip", "cut", "zero", "remove"])
def test_damage_to_any_file_is_found(
    saved: tuple[Path, dict[str, torch.Tensor]], damage: Callable[[Path], None]
) -> None:
    folder, _ = saved
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        if damage is zero and file.stat().st_size < 65536:
            continue
        good = file.read_bytes()
        damage(file)
        if file.name == "landfall.json" and damage is Path.unlink:
            with pytest.raises(NoCheckpointError):
                verify(folder)
        else:
            report = verify(folder)
            assert not report.ok and file.name in "\n".join(report.lines()), file
        file.write_bytes(good)
    assert verify(folder).ok


@pytest.mark.case("c01")
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flip", "cut", "remove"])
def test_newest_damaged_checkpoint_is_skipped_with_the_reason(
    tmp_path: Path, session: Session, damage: Callable[[Path], None]
) -> None:
    for step in (10, 20):
        save(make_contents(make_state(step)), LocalStore(tmp_path / f"checkpoint-{step}"), session, step=step)
    assert newest(tmp_path).step == 20
    [data_file] = (tmp_path / "checkpoint-20").rglob("*.distcp")
    damage(data_file)
    found = newest(tmp_path)
    assert found.step == 10 and found.folder == tmp_path / "checkpoint-10"
    assert "checkpoint-20" in found.skipped[0] and data_file.name in found.skipped[0]
    with pytest.raises(DamagedError, match="checkpoint-20"):
        newest(tmp_path / "checkpoint-20")


def test_folder_without_commit_is_no_checkpoint(tmp_path: Path, session: Session) -> None:
    save(make_contents(make_state()), LocalStore(tmp_path / "checkpoint-10"), session, step=10)
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-30" / "latest_checkpointed_iteration.txt").write_text("30\n")
    assert newest(tmp_path).step == 10
    with pytest.raises(NoCheckpointError, match="checkpoint-30"):
        newest(tmp_path / "checkpoint-30")


@pytest.mark.case("c01")
@pytest.mark.parametrize("text", [b"", b"999\n", b"release", b"\xff\xfe\x00", None], ids=repr)
def test_tracker_that_is_wrong_or_torn_changes_nothing(
    tmp_path: Path, session: Session, text: bytes | None
) -> None:
    for step in (10, 20):
        contents = make_contents(make_state())
        contents.files["latest_checkpointed_iteration.txt"] = f"{step}\n".encode()
        save(contents, LocalStore(tmp_path / f"checkpoint-{step}"), session, step=step)
    for folder in (tmp_path, tmp_path / "checkpoint-20"):
        tracker = folder / "latest_checkpointed_iteration.txt"
        tracker.unlink(missing_ok=True)
        if text is not None:
            tracker.write_bytes(text)
    assert newest(tmp_path).step == 20 and newest(tmp_path).skipped == []
    assert newest(tmp_path / "checkpoint-20").step == 20
