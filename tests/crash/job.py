"""What the ranks of the crash tests do: save, and die where they are told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, Safetensors, TorchDist
from landfall.engine.latest import newest
from landfall.engine.load import load
from landfall.engine.protocol import Step
from landfall.engine.save import save
from landfall.engine.session import Session, solo_session
from landfall.engine.stage import Stager
from landfall.errors import SaveError
from landfall.format.hf_folder import plan_export
from landfall.format.safetensors import from_torch_dtype
from landfall.format.shards import Box, Shard, whole
from landfall.format.torch_dist import object_bytes
from landfall.store.local import LocalStore
from landfall.testing.faults import FaultyStore, Recorder, kill_at_step, kill_before_change

ROWS, COLUMNS = 8, 64
DEADLINE_S = 1.5
"""Of the save in which somebody dies."""


def contents_of(value: float, rank: int = 0, world_size: int = 1, num_files: int = 1) -> Contents:
    """Every number in it is ``value``: a mixture of two saves shows. ``num_files`` of safetensors."""
    mine = torch.full((ROWS, COLUMNS), value)
    box = Box((rank * ROWS, 0), (ROWS, COLUMNS))
    rows = Shard("rows", (world_size * ROWS, COLUMNS), box, mine, (rank,))
    tensors = [torch.full((300,), value) for _ in range(num_files)]
    everyone = tuple(range(world_size))
    weights = [Shard(f"w{n}", (300,), whole((300,)), t, everyone) for n, t in enumerate(tensors)]
    sizes = {w.key: (from_torch_dtype(w.data.dtype), (300,)) for w in weights}
    return Contents(
        TorchDist([rows, *weights], [], object_bytes({"value": value}), "iter_0000001/"),
        Safetensors(weights, plan_export(sizes, "1.5KB")),
        {"config.json": f'{{"value": {value}}}'.encode()},
        index_folder="iter_0000001/",
    )


def value_in(folder: Path) -> float:
    """The one number that a checkpoint is full of; every byte of it is verified, in every format."""
    source = Checkpoint(LocalStore(folder))
    records = source.tensors(TORCH_DIST)
    found = {key: torch.zeros(group[0].global_shape) for key, group in records.items()}
    load(
        [Shard(k, tuple(t.shape), whole(tuple(t.shape)), t, (0,)) for k, t in found.items()],
        source,
        TORCH_DIST,
    )
    values = {float(number) for tensor in found.values() for number in tensor.flatten()}
    assert len(values) == 1, f"a mixture of saves: {values}"
    (value,) = values
    assert source.read_file("config.json") == f'{{"value": {value}}}'.encode()
    return value


def start_session() -> Session:
    dist.init_process_group("gloo")
    return Session(TCPStoreCoordinator.from_process_group(), Stager(torch.device("cpu")), deadline_s=60.0)


def failing(store: LocalStore, rank: int, step: Step) -> LocalStore | FaultyStore:
    """For steps that only a failed save reaches: rank 0 fails to replace landfall.json."""

    class NoCommit(FaultyStore):
        def put(self, name: str, data: bytes) -> None:  # type: ignore[override]
            if name == "landfall.json":
                raise OSError(errno.EIO, os.strerror(errno.EIO), self.describe(name))
            super().put(name, data)

    return NoCommit(store, errno.EIO, 1 << 60) if step in AFTER_FAILURE and rank == 0 else store


AFTER_FAILURE = (Step.RESTORED, Step.UNDONE)


def save_and_die(folder: str, step: Step, occurrence: int, victims: list[int], again: bool) -> str:
    """Save 1 into ``folder`` if ``again``, then 2, and die on the way; or tell what the survivor met."""
    session, store = start_session(), LocalStore(Path(folder))
    world = session.coordinator.world_size
    if again:
        save(contents_of(1.0, session.rank, world, 2), store, session, step=1)
    dist.barrier()
    session.deadline_s = DEADLINE_S
    if session.rank in victims:
        kill_at_step(step, occurrence)
    try:
        save(contents_of(2.0, session.rank, world), failing(store, session.rank, step), session, step=1)
    except SaveError as error:
        return str(error)
    finally:
        session.coordinator.close(DEADLINE_S)
    return ""


def save_well(folder: str, value: float) -> None:
    session = start_session()
    save(
        contents_of(value, session.rank, session.coordinator.world_size), LocalStore(folder), session, step=1
    )
    session.coordinator.close()


def steps_of_a_save(folder: str) -> list[list[tuple[str, str]]]:
    """The steps of a save into a new folder, of one over it, and of one over it that fails."""
    session, found = solo_session(), []
    for attempt, step in enumerate((Step.BEGUN, Step.BEGUN, Step.RESTORED)):
        with Recorder() as recorder:
            try:
                store = failing(LocalStore(folder), 0, step)
                save(contents_of(float(attempt), num_files=2 - attempt % 2), store, session, step=1)
            except SaveError:
                assert attempt == 2
        found.append([(step.name, name) for step, name in recorder.steps])
    return found


def kill_before_every_change(folder: str, again: bool, fails: bool) -> tuple[int, list[float | None]]:
    """Die before the n-th change to a file, for every n, in a process of its own; then look, and save again.

    Returns how many changes a save makes, and what was found after each kill (None: no checkpoint).
    """
    found: list[float | None] = []
    number = 0
    while True:
        number += 1
        root = Path(folder) / str(number)
        place = root / "checkpoint-1"
        save(contents_of(0.5), LocalStore(root / "checkpoint-0"), solo_session(), step=0)
        if again:
            save(contents_of(1.0, num_files=2), LocalStore(place), solo_session(), step=1)
        status = in_a_child(lambda place=place, number=number: die_in_a_save(place, number, fails))
        found.append(look(root, place))
        save(contents_of(3.0), LocalStore(place), solo_session(), step=1)
        assert value_in(place) == 3.0
        assert not (foreign := leftovers(place)), foreign
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return number - 1, found


def die_in_a_save(place: Path, number: int, fails: bool) -> None:
    kill_before_change(number)
    try:
        step = Step.RESTORED if fails else Step.BEGUN
        save(contents_of(2.0), failing(LocalStore(place), 0, step), solo_session(), step=1)
    except SaveError:
        assert fails


def look(root: Path, place: Path) -> float | None:
    """What is in the folder, which must be what is chosen; the checkpoint before it must be there whatever."""
    chosen = newest(root)
    assert value_in(root / "checkpoint-0") == 0.5
    if not (place / "landfall.json").exists():
        assert chosen.folder == root / "checkpoint-0"
        return None
    assert chosen.folder == place
    return value_in(place)


def leftovers(place: Path) -> list[str]:
    """Files that are not of the committed save."""
    checkpoint = Checkpoint(LocalStore(place))
    named = {extent.file for extent in checkpoint.extents()}
    named |= {writer.index for writer in checkpoint.manifest.writers} | {"landfall.json"}
    return [name for name in LocalStore(place).list() if name not in named]


def in_a_child(action: Callable[[], object]) -> int:
    """The wait status of a forked child that does ``action``."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]
