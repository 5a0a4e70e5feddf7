"""Any box of any tensor comes back, verified, and what is damaged is named."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import SAFETENSORS, TORCH_DIST, Contents, TorchDist
from landfall.engine.hugging_face import HuggingFaceFolder
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import Session, solo_session
from landfall.engine.stock import StockCheckpoint
from landfall.errors import CheckpointError, DamagedError
from landfall.format.index import CHUNK_BYTES
from landfall.format.shards import Box, Shard, boxes_of_flat_range, whole
from landfall.format.torch_dist import object_bytes
from landfall.store.local import LocalStore
from landfall.store.memory import MemoryStore

from .conftest import shards_of


@pytest.mark.parametrize("kind", ["ours", "ours as safetensors", "stock reader", "hugging face reader"])
def test_box_of_a_tensor_is_loaded_from_every_source(
    saved: tuple[Path, dict[str, torch.Tensor]], kind: str
) -> None:
    folder, state = saved
    source, part = {
        "ours": lambda: (Checkpoint(LocalStore(folder)), TORCH_DIST),
        "ours as safetensors": lambda: (Checkpoint(LocalStore(folder)), SAFETENSORS),
        "stock reader": lambda: (StockCheckpoint(LocalStore(folder), "iter_0000005/"), TORCH_DIST),
        "hugging face reader": lambda: (HuggingFaceFolder(folder), SAFETENSORS),
    }[kind]()
    boxes = {
        "embedding": Box((700, 100), (150, 37)),
        "layers": Box((1, 3, 0), (2, 30, 64)),
        "norm": Box((5,), (9,)),
    }
    wanted = [
        Shard(key, tuple(state[key].shape), box, torch.zeros(box.sizes, dtype=state[key].dtype), (0,))
        for key, box in boxes.items()
    ]
    load(wanted, source, part)
    for shard in wanted:
        at = tuple(slice(o, o + n) for o, n in zip(shard.box.offsets, shard.box.sizes, strict=True))
        assert torch.equal(shard.data, state[shard.key][at]), shard.key


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flat_ranges_saved_by_some_ranks_load_into_any_others(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    total = math.prod(shape)
    tensor = torch.randn(shape)
    cuts = st.lists(st.integers(0, total), max_size=4).map(lambda c: sorted({0, total, *c}))
    shards, wanted, into = [], [], torch.zeros(shape)
    for start, end in zip((edges := data.draw(cuts))[:-1], edges[1:], strict=True):
        shards += flat_shards(tensor, start, end)
    store, session = MemoryStore(), solo_session()
    save(Contents(TorchDist(shards, [], object_bytes({}))), store, session, step=1)
    for start, end in zip((edges := data.draw(cuts))[:-1], edges[1:], strict=True):
        wanted += flat_shards(into, start, end)
    load(wanted, Checkpoint(store), TORCH_DIST)
    assert torch.equal(into, tensor)


def flat_shards(tensor: torch.Tensor, start: int, end: int) -> list[Shard]:
    flat, shards = tensor.view(-1)[start:end], []
    position = 0
    for box in boxes_of_flat_range(tuple(tensor.shape), start, end):
        shards.append(
            Shard(
                "w",
                tuple(tensor.shape),
                box,
                flat[position : position + box.num_elements].view(box.sizes),
                (0,),
            )
        )
        position += box.num_elements
    assert position == end - start and len(shards) <= 2 * tensor.dim() - 1
    return shards


def test_stock_dcp_checkpoint_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(50, 60),
        "turned": torch.randn(20, 30).t(),
        "b": torch.randn(7).to(torch.bfloat16),
    }
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    found = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in state.items()}
    load(shards_of(found), StockCheckpoint(LocalStore(tmp_path / "stock")), TORCH_DIST)
    for key, tensor in state.items():
        assert torch.equal(found[key], tensor), key


def test_other_dtype_is_cast_on_load(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    into = torch.zeros(900, 1200, dtype=torch.bfloat16)
    load(
        [Shard("embedding", (900, 1200), whole((900, 1200)), into, (0,))],
        Checkpoint(LocalStore(folder)),
        TORCH_DIST,
    )
    assert torch.equal(into, state["embedding"].to(torch.bfloat16))


def test_missing_tensor_is_named_and_nothing_is_changed(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    into = {"norm": torch.zeros(64), "not_there": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="not_there"):
        load(shards_of(into), Checkpoint(LocalStore(folder)), TORCH_DIST)
    assert not into["norm"].any()


def test_tensor_of_another_shape_is_refused(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = saved
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*norm(.|\n)*\[64\](.|\n)*\[65\]"):
        load(shards_of({"norm": torch.zeros(65)}), Checkpoint(LocalStore(folder)), TORCH_DIST)


def test_partial_load_reads_only_the_chunks_it_touches(tmp_path: Path, session: Session) -> None:
    state = {f"w{i}": torch.randn(1024, 1024) for i in range(8)}  # 4 MiB each
    save(Contents(TorchDist(shards_of(state), [], object_bytes({}))), LocalStore(tmp_path), session, step=1)
    into = torch.zeros(10, 1024)
    report = load(
        [Shard("w5", (1024, 1024), Box((500, 0), (10, 1024)), into, (0,))],
        Checkpoint(LocalStore(tmp_path)),
        TORCH_DIST,
    )
    assert torch.equal(into, state["w5"][500:510])
    assert report.num_bytes_read <= 2 * CHUNK_BYTES


@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_bit_is_found_on_load_and_names_the_file(
    saved: tuple[Path, dict[str, torch.Tensor]], seed: int
) -> None:
    folder, state = saved
    [data_file] = (folder / "iter_0000005").glob("*.distcp")
    damaged = bytearray(data_file.read_bytes())
    place = random.Random(seed).randrange(len(damaged))
    damaged[place] ^= 1 << seed
    data_file.write_bytes(damaged)
    found = {key: torch.zeros_like(t) for key, t in state.items()}
    with pytest.raises(DamagedError, match=data_file.name.replace(".", r"\.")):
        load(shards_of(found), Checkpoint(LocalStore(folder)), TORCH_DIST)
