"""Ranks that share a model on GPUs (on one, if there is only one): as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.test_columns import MATRICES, contents_of, matrix, start_session
from tests.sft.conftest import world  # noqa: F401 - a fixture
from tests.sft.test_layouts import LAYOUTS, TRAINING, after
from tests.sft.trainer import World, run_sft

from landfall.engine.verify import verify
from landfall.testing.procs import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["TP2", "TP2+SP", "PP2", "CP2"])
def test_layout_trains_and_resumes_as_one_rank(name: str, world: World, tmp_path: Path) -> None:  # noqa: F811
    ranks, sizes = LAYOUTS[name]
    training = {
        **TRAINING,
        "env": {"CUDA_VISIBLE_DEVICES": "0"},
    }  # the trainer's tests hide the GPU otherwise
    one = run_sft(world, tmp_path / "one", **training)
    run = run_sft(world, tmp_path / "run", ranks, **training, **sizes)
    assert run.losses == pytest.approx(one.losses, abs=1e-4)
    assert verify(run.checkpoint(4)).ok
    back = run_sft(world, tmp_path / "back", load=run.checkpoint(2), **training)
    assert back.losses == pytest.approx(after(one.losses, 2), abs=1e-4)


def export_from_device(folder: str) -> int:
    from dataclasses import replace

    from landfall.engine import columns
    from landfall.engine.save import save
    from landfall.engine.stage import Stager
    from landfall.store.local import LocalStore

    columns.CHUNK_BYTES = 1000
    device = torch.device("cuda", 0)
    session = start_session()
    session.stager, session.sending_stager = Stager(device, 4096), Stager(device, 512)
    contents = contents_of(session.rank, 3)
    assert contents.safetensors is not None
    shards = [replace(shard, data=shard.data.to(device)) for shard in contents.safetensors.shards]
    contents = replace(contents, safetensors=replace(contents.safetensors, shards=shards))
    before = torch.cuda.max_memory_allocated()
    save(contents, LocalStore(folder), session, step=1)
    session.coordinator.close()
    return torch.cuda.max_memory_allocated() - before


def test_columns_on_devices_become_whole_matrices_without_device_memory(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert run_ranks(export_from_device, 3, str(tmp_path)) == [0, 0, 0]
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], matrix(name)) for name in MATRICES)
