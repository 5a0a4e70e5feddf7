"""landfall.save and landfall.load on plain dicts and DTensors, from one rank and from several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import landfall
from landfall.errors import CheckpointError, DamagedError, NoCheckpointError, UsageError
from landfall.testing.procs import run_ranks


def state_of(value: float) -> dict[str, object]:
    return {
        "model": {"weight": torch.full((3, 4), value), "bias": torch.full((4,), value, dtype=torch.bfloat16)},
        "step": int(value),
        "names": ["a", "b"],
        "optimizer": {"lr": 0.5, "empty": {}},
    }


def test_state_comes_back_in_place(tmp_path: Path) -> None:
    landfall.save(state_of(3.0), tmp_path / "checkpoint-3", step=3)
    state = state_of(0.0)
    weight = state["model"]["weight"]  # type: ignore[index]
    assert landfall.load(state, tmp_path / "checkpoint-3") == 3
    assert state["model"]["weight"] is weight and weight.eq(3.0).all()  # type: ignore[index]
    assert state["step"] == 3 and state["names"] == ["a", "b"]
    assert landfall.latest(tmp_path) == tmp_path / "checkpoint-3"
    assert landfall.verify(tmp_path / "checkpoint-3").ok


def test_what_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    landfall.save({"a": torch.ones(5)}, tmp_path)
    with pytest.raises(CheckpointError, match="no b"):
        landfall.load({"b": torch.ones(5)}, tmp_path)
    with pytest.raises(CheckpointError, match="lacks values"):
        landfall.load({"a": torch.ones(5), "value": 1}, tmp_path)
    with pytest.raises(UsageError, match="Lists in a state dict"):
        landfall.save({"a": [torch.ones(5)]}, tmp_path)
    with pytest.raises(UsageError, match="one name"):
        landfall.save({"a.b": torch.ones(5), "a": {"b": torch.ones(5)}}, tmp_path)
    [file] = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DamagedError):
        landfall.load({"a": torch.ones(5)}, tmp_path)
    with pytest.raises(NoCheckpointError):
        landfall.latest(tmp_path / "nowhere")


def save_dtensors(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7 * 10).view(7, 10).float()
    tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    landfall.save({"w": tensor, "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}, folder, step=9)
    other = distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1), Replicate()])
    assert landfall.load({"both": other}, folder) == 9
    assert torch.equal(other.full_tensor(), whole)
    dist.barrier()


def test_dtensors_are_saved_by_their_holders_and_load_into_another_layout(tmp_path: Path) -> None:
    run_ranks(save_dtensors, 4, str(tmp_path))
    into = {"w": torch.zeros(7, 10), "both": torch.zeros(7, 10)}
    landfall.load(into, tmp_path)
    assert all(torch.equal(t, torch.arange(70).view(7, 10).float()) for t in into.values())


def test_import_of_the_package_needs_no_torch() -> None:
    code = "import sys, landfall; assert 'torch' not in sys.modules; landfall.save; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
