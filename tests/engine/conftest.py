"""A small state in every format, saved by the real engine into a real folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from landfall.engine.contents import Contents, Safetensors, TorchDist
from landfall.engine.save import save
from landfall.engine.session import Session, solo_session
from landfall.format.hf_folder import plan_export
from landfall.format.safetensors import from_torch_dtype
from landfall.format.shards import ObjectShard, Shard, whole
from landfall.format.torch_dist import object_bytes
from landfall.store.local import LocalStore


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several shapes and dtypes, a scalar and an empty one among them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(900, 1200, generator=draw),
        "layers": torch.randn(3, 40, 64, generator=draw).to(torch.bfloat16),
        "norm": torch.randn(64, generator=draw),
        "scale": torch.randn((), generator=draw),
        "none": torch.empty(0, 8),
        "counts": torch.arange(77, dtype=torch.int64),
    }


def shards_of(state: dict[str, torch.Tensor], replicas: tuple[int, ...] = (0,)) -> list[Shard]:
    return [Shard(key, tuple(t.shape), whole(tuple(t.shape)), t, replicas) for key, t in state.items()]


def make_contents(state: dict[str, torch.Tensor], *, optimizer: bool = True) -> Contents:
    shards = shards_of(state)
    sizes = {key: (from_torch_dtype(t.dtype), tuple(t.shape)) for key, t in state.items()}
    objects = [ObjectShard("rng/shard_0_1", object_bytes([{"seed": 5}]), (0,))]
    return Contents(
        TorchDist(shards if optimizer else [], objects, object_bytes({"iteration": 5}), "iter_0000005/"),
        Safetensors(shards, plan_export(sizes, "2MB")),
        {"config.json": b'{"model_type": "qwen3_vl"}'},
        index_folder="iter_0000005/",
    )


@pytest.fixture
def session() -> Session:
    return solo_session()


@pytest.fixture
def saved(tmp_path: Path, session: Session) -> tuple[Path, dict[str, torch.Tensor]]:
    """A committed checkpoint-5 (in a folder named in Chinese, with an emoji) and the state in it."""
    state = make_state()
    folder = tmp_path / "检查点🚀" / "checkpoint-5"
    save(make_contents(state), LocalStore(folder), session, step=5)
    return folder, state
