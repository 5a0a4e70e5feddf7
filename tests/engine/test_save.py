"""What a save leaves on disk, who can read it, and what a failed one leaves untouched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.verify import verify
from landfall.errors import NoCheckpointError, SaveError
from landfall.format.manifest import NAME
from landfall.format.shards import Shard, whole
from landfall.store.base import Buffer, WriteFile
from landfall.store.local import LocalStore

from .conftest import make_contents, make_state, shards_of


def load_all(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros_like(t) for key, t in state.items()}
    load(shards_of(found), Checkpoint(LocalStore(folder)), TORCH_DIST)
    return found


def assert_equal(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    for key, tensor in state.items():
        assert torch.equal(found[key], tensor), key


def test_save_then_load_returns_every_bit(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    assert_equal(load_all(folder, state), state)
    assert verify(folder).ok


def test_save_is_read_by_plain_torch_dcp(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    found = {key: torch.zeros_like(t) for key, t in state.items() if t.numel()}
    dcp.load(found, checkpoint_id=folder / "iter_0000005", no_dist=True)
    assert_equal(found, {key: t for key, t in state.items() if t.numel()})


def test_save_is_read_by_safetensors(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    found = {}
    for file in folder.glob("model-*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found.update({key: tensors.get_tensor(key) for key in tensors.keys()})  # noqa: SIM118
    assert found.keys() == state.keys()
    assert_equal(found, state)


def test_second_save_into_a_folder_leaves_only_its_own_files(
    saved: tuple[Path, dict[str, torch.Tensor]], session: Session
) -> None:
    folder, _ = saved
    names = sorted(p.name for p in folder.rglob("*"))
    newer = make_state(seed=1)
    manifest = save(make_contents(newer), LocalStore(folder), session, step=5)
    assert_equal(load_all(folder, newer), newer)
    assert len(list(folder.rglob("*"))) == len(names)
    carrying_an_id = [p.name for p in folder.rglob("*") if ".lf" in p.name]
    assert carrying_an_id and all(manifest.save_id in name for name in carrying_an_id)


class FailingStore(LocalStore):
    """A disk that is full after ``room`` bytes."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.left = room

    def open_write(self, name: str) -> WriteFile:
        return FailingFile(super().open_write(name), self, str(self.root / name))

    def put(self, name: str, data: Buffer) -> None:
        self.take(len(memoryview(data)), str(self.root / name))
        super().put(name, data)

    def take(self, num_bytes: int, place: str) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


class FailingFile(WriteFile):
    def __init__(self, file: WriteFile, store: FailingStore, place: str) -> None:
        self._file, self._store, self._place = file, store, place

    def write_at(self, offset: int, data: Buffer) -> None:
        self._store.take(len(memoryview(data)), self._place)
        self._file.write_at(offset, data)

    def finish(self) -> None:
        self._file.finish()

    def close(self) -> None:
        self._file.close()


@pytest.mark.case("a06")
@pytest.mark.parametrize("lacking", [10**9, 8_000_000, 4_000_000, 5_000, 3_000, 800, 1])
def test_full_disk_at_any_point_keeps_the_checkpoint_before(
    saved: tuple[Path, dict[str, torch.Tensor]], session: Session, tmp_path: Path, lacking: int
) -> None:
    folder, state = saved
    roomy = FailingStore(tmp_path / "measure", 10**9)
    save(make_contents(make_state(seed=1)), roomy, session, step=6)
    room = 10**9 - roomy.left - lacking
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(SaveError, match="ENOSPC.*bytes free") as caught:
        save(make_contents(make_state(seed=1)), FailingStore(folder, room), session, step=6)
    assert "rank 0, step 6" in str(caught.value)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert_equal(load_all(folder, state), state)
    newer = make_state(seed=2)
    save(make_contents(newer), LocalStore(folder), session, step=6)
    assert_equal(load_all(folder, newer), newer)


def test_full_disk_in_a_new_folder_leaves_no_checkpoint(tmp_path: Path, session: Session) -> None:
    with pytest.raises(SaveError):
        save(make_contents(make_state()), FailingStore(tmp_path / "new", 1_000_000), session, step=1)
    assert not (tmp_path / "new" / NAME).exists()
    assert not [p for p in (tmp_path / "new").rglob("*") if p.is_file()]
    with pytest.raises(NoCheckpointError, match="no committed checkpoint"):
        verify(tmp_path / "new")


def test_tensor_that_no_rank_holds_whole_is_not_committed(tmp_path: Path, session: Session) -> None:
    state = make_state()
    contents = make_contents(state)
    assert contents.torch_dist is not None
    half = whole((450, 1200))
    contents.torch_dist.shards[0] = Shard("embedding", (900, 1200), half, state["embedding"][:450], (0,))
    with pytest.raises(SaveError, match="embedding: 540000 of 1080000 elements"):
        save(contents, LocalStore(tmp_path), session, step=1)
    assert not (tmp_path / NAME).exists()


def test_non_contiguous_tensor_is_saved_in_row_major_order(tmp_path: Path, session: Session) -> None:
    base = torch.randn(30, 20, 10)
    for number, view in enumerate((base.transpose(0, 1), base[:, ::2], base.permute(2, 0, 1)[3:7])):
        folder = tmp_path / str(number)
        save(make_contents({"view": view}), LocalStore(folder), session, step=1)
        assert_equal(load_all(folder, {"view": view}), {"view": view})
