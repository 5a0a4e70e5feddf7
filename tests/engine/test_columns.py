"""Matrices that ranks hold by columns, written as rows: the right bytes, bounded memory, and no endless wait."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from landfall.coord.base import Coordinator
from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine import columns
from landfall.engine.contents import Contents, Safetensors, TorchDist
from landfall.engine.peers import Peers
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.engine.verify import verify
from landfall.errors import SaveError
from landfall.format.hf_folder import SINGLE_FILE, plan_export
from landfall.format.shards import Box, Shard, whole
from landfall.format.torch_dist import object_bytes
from landfall.store.base import WriteFile
from landfall.store.local import LocalStore
from landfall.testing.procs import RanksFailed, run_ranks, start_ranks

MATRICES = {"wide": (2, 96), "tall": (301, 6), "square": (64, 48), "square2": (64, 48)}
TP = 3


def matrix(name: str) -> torch.Tensor:
    rows, width = MATRICES[name]
    return torch.arange(rows * width).reshape(rows, width).float() + len(name)


def contents_of(rank: int, world_size: int, dtype: torch.dtype = torch.float32) -> Contents:
    """Every matrix by columns on TP ranks, the same on all such groups; and one that all ranks hold."""
    member, groups = rank % TP, tuple(tuple(range(a, a + TP)) for a in range(0, world_size, TP))
    replicas = tuple(range(member, world_size, TP))
    shards = []
    for name, (rows, width) in MATRICES.items():
        part = width // TP
        box = Box((0, member * part), (rows, part))
        data = matrix(name)[:, member * part : (member + 1) * part].contiguous()
        shards.append(Shard(name, (rows, width), box, data, replicas))
    everyones = torch.ones(50, 4)
    shards.append(Shard("whole", (50, 4), whole((50, 4)), everyones, tuple(range(world_size))))
    plan = plan_export({name: ("F32", shape) for name, shape in {**MATRICES, "whole": (50, 4)}.items()})
    return Contents(TorchDist([], [], object_bytes({})), Safetensors(shards, plan, groups))


def start_session(deadline_s: float = 60.0) -> Session:
    dist.init_process_group("gloo")
    return Session(TCPStoreCoordinator.from_process_group(), Stager(torch.device("cpu")), deadline_s)


def export(folder: str, chunk_bytes: int) -> None:
    columns.CHUNK_BYTES = chunk_bytes
    session = start_session()
    for step in (1, 2):
        save(contents_of(session.rank, dist.get_world_size()), LocalStore(folder), session, step=step)
    session.coordinator.close()


@pytest.mark.parametrize(("ranks", "chunk_bytes"), [(3, 1), (6, 1000), (6, columns.CHUNK_BYTES)])
def test_columns_of_several_ranks_become_whole_matrices(tmp_path: Path, ranks: int, chunk_bytes: int) -> None:
    run_ranks(export, ranks, str(tmp_path), chunk_bytes)
    found = load_file(tmp_path / SINGLE_FILE)
    assert found.keys() == {*MATRICES, "whole"}
    assert all(torch.equal(found[name], matrix(name)) for name in MATRICES)
    assert verify(tmp_path).ok


class FullDisk(LocalStore):
    def open_write(self, name: str) -> WriteFile:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))


def export_with_a_full_disk(folder: str) -> tuple[str, float]:
    session = start_session()
    store = FullDisk(folder) if session.rank == 1 else LocalStore(folder)
    began = time.monotonic()
    with pytest.raises(SaveError) as error:
        save(contents_of(session.rank, 3), store, session, step=1)
    seconds = time.monotonic() - began
    save(contents_of(session.rank, 3), LocalStore(folder), session, step=2)
    session.coordinator.close()
    return str(error.value), seconds


def test_rank_that_fails_before_it_sends_does_not_hold_up_its_peers(tmp_path: Path) -> None:
    results = run_ranks(export_with_a_full_disk, 3, str(tmp_path))
    assert len({text for text, _ in results}) == 1
    assert "ENOSPC" in results[0][0] or "No space" in results[0][0], results[0][0]
    assert max(seconds for _, seconds in results) < 20
    assert verify(tmp_path).ok


def wait_for_a_dead_peer(folder: str) -> str:
    session = start_session()
    peers = Peers(session.coordinator, (0, 1), "peers", 30.0)
    if session.rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(SaveError) as error:
        peers.receive(1, memoryview(bytearray(10)))
    Path(folder, "told").write_text(str(error.value))
    return str(error.value)


def test_dead_peer_is_named_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with start_ranks(wait_for_a_dead_peer, 2, str(tmp_path)) as ranks:
        ranks.exit_codes(25)
    assert "Rank 1 did not hand over its part" in (tmp_path / "told").read_text()
    assert time.monotonic() - began < 20


def meet_beside_a_stranger() -> bytes:
    session = start_session()
    if session.rank == 1:
        _call_with_a_wrong_token(session.coordinator)
    peers = Peers(session.coordinator, (0, 1), "peers", 30.0)
    got = bytearray(5)
    peers.send(1 - session.rank, memoryview(f"from{session.rank}".encode()))
    peers.receive(1 - session.rank, memoryview(got))
    peers.close()
    session.coordinator.close()
    return bytes(got)


def _call_with_a_wrong_token(coordinator: Coordinator) -> None:
    import msgspec

    address = msgspec.msgpack.decode(coordinator.collect("peers", [0], 30.0)[0])
    with socket.create_connection(("localhost", address["port"])) as stranger:
        stranger.sendall(b"x" * 20)


def test_stranger_that_calls_is_not_taken_for_a_peer() -> None:
    assert run_ranks(meet_beside_a_stranger, 2) == [b"from1", b"from0"]


def test_peer_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="Rank 1 did not hand over"):
        run_ranks(wait_for_nobody, 2)


def wait_for_nobody() -> None:
    session = start_session()
    if session.rank == 0:
        Peers(session.coordinator, (0, 1), "peers", 0.5)
    session.coordinator.close()


def test_boxes_that_are_no_columns_of_their_group_are_refused() -> None:
    shard = Shard("a", (4, 6), Box((0, 0), (4, 3)), torch.zeros(4, 3), (1,))
    with pytest.raises(ValueError, match="not the column of rank 1"):
        columns.my_matrices([shard], ((0, 1),), 1)


def export_without_contents(folder: str) -> tuple[str, float]:
    session = start_session()

    def make() -> Contents:
        if session.rank == 1:
            raise RuntimeError("no memory to describe the model")
        return contents_of(session.rank, 3)

    began = time.monotonic()
    with pytest.raises(SaveError) as error:
        save(make, LocalStore(folder), session, step=1)
    seconds = time.monotonic() - began
    session.coordinator.close()
    return str(error.value), seconds


def test_rank_that_fails_before_it_meets_its_peers_does_not_hold_them_up(tmp_path: Path) -> None:
    for text, seconds in run_ranks(export_without_contents, 3, str(tmp_path)):
        assert "no memory to describe the model" in text
        assert seconds < 20
