"""Several real ranks save one checkpoint: shares, disagreement, failure and death of a rank."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.engine.verify import verify
from landfall.errors import NoCheckpointError, SaveError
from landfall.format.shards import Box, Shard, whole
from landfall.format.torch_dist import object_bytes
from landfall.store.base import WriteFile
from landfall.store.local import LocalStore
from landfall.testing.procs import run_ranks, start_ranks

REPLICATED, SHARDED = 24, 8


def start_session(deadline_s: float = 60.0) -> Session:
    dist.init_process_group("gloo")
    return Session(TCPStoreCoordinator.from_process_group(), Stager(torch.device("cpu")), deadline_s)


def contents_of(rank: int, world_size: int, odd: bool = False) -> Contents:
    """Tensors that all ranks hold, and one of which each holds its rows."""
    draw = torch.Generator().manual_seed(7)
    everyone = tuple(range(world_size))
    shards = []
    for number in range(REPLICATED):
        tensor = torch.randn(100 + number, 64, generator=draw)
        name = "odd" if odd and number == 3 else f"replicated{number}"
        shards.append(Shard(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor, everyone))
    rows = torch.full((SHARDED, 1000), float(rank))
    box = Box((rank * SHARDED, 0), (SHARDED, 1000))
    shards.append(Shard("sharded", (world_size * SHARDED, 1000), box, rows, (rank,)))
    return Contents(TorchDist(shards, [], object_bytes({"iteration": 1})))


def save_on_every_rank(folder: str) -> list[int]:
    session = start_session()
    world_size = dist.get_world_size()
    for step in (1, 2):
        save(contents_of(session.rank, world_size), LocalStore(folder), session, step=step)
    checkpoint = Checkpoint(LocalStore(folder))
    into = torch.zeros(world_size * SHARDED, 1000)
    load([Shard("sharded", tuple(into.shape), whole(tuple(into.shape)), into, (0,))], checkpoint, TORCH_DIST)
    assert torch.equal(into[:, 0], torch.arange(world_size).repeat_interleave(SHARDED).float())
    session.coordinator.close()
    return [sum(extent.length for extent in index.extents) for index in checkpoint.indexes[:world_size]]


def test_ranks_share_the_bytes_of_what_they_all_hold(tmp_path: Path) -> None:
    loads = run_ranks(save_on_every_rank, 4, str(tmp_path))
    assert loads[0] == loads[3]
    assert max(loads[0]) < 1.25 * min(loads[0]), "common.pt and rows apart, every rank writes the same share"
    assert verify(tmp_path).ok and verify(tmp_path).num_tensors == {TORCH_DIST: REPLICATED + 1}


class BrokenDisk(LocalStore):
    def open_write(self, name: str) -> WriteFile:
        raise OSError(errno.EIO, os.strerror(errno.EIO), self.describe(name))


def save_with_a_broken_disk(folder: str) -> str:
    session = start_session()
    save(contents_of(session.rank, 3), LocalStore(folder), session, step=1)
    store = BrokenDisk(folder) if session.rank == 2 else LocalStore(folder)
    try:
        save(contents_of(session.rank, 3), store, session, step=2)
    except SaveError as error:
        message = str(error)
    dist.barrier()
    save(contents_of(session.rank, 3), LocalStore(folder), session, step=3)
    session.coordinator.close()
    return message


def test_disk_error_on_one_rank_is_named_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    for message in run_ranks(save_with_a_broken_disk, 3, str(tmp_path)):
        assert "rank 2, step 2" in message and "EIO" in message and "bytes free" in message
    report = verify(tmp_path)
    assert report.ok and report.step == 3
    assert {name.split(".")[1] for name in os.listdir(tmp_path) if name.startswith("__")} == {report.save_id}


def save_odd_model(folder: str) -> str:
    session = start_session()
    with pytest.raises(SaveError) as caught:
        save(contents_of(session.rank, 3, odd=session.rank == 1), LocalStore(folder), session, step=9)
    session.coordinator.close()
    return str(caught.value)


def test_ranks_with_different_models_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(save_odd_model, 3, str(tmp_path)):
        assert "hold different ones" in message and "step 9" in message and "[0, 1, 2]" in message
    with pytest.raises(NoCheckpointError):
        verify(tmp_path)


def save_beside_a_dead_rank(folder: str) -> str:
    session = start_session(deadline_s=3.0)
    save(contents_of(session.rank, 3), LocalStore(folder), session, step=1)
    if session.rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(SaveError) as caught:
        save(contents_of(session.rank, 3), LocalStore(folder), session, step=2)
    session.coordinator.close(2.0)  # rank 0 keeps the answer until rank 2 has read it
    return str(caught.value)


def test_dead_rank_is_named_by_the_others_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    with start_ranks(save_beside_a_dead_rank, 3, str(tmp_path)) as ranks:
        assert ranks.exit_codes(60)[1] == -9
        messages = [ranks.result(rank) for rank in (0, 2)]
    assert all("no answer from rank 1" in message for message in messages)
    report = verify(tmp_path)
    assert report.ok and report.step == 1
