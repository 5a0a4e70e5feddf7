"""``landfall sft`` on ranks that share the model: the same training as on one rank, and the same files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST
from landfall.engine.verify import verify
from landfall.store.local import LocalStore
from tests.sft.trainer import Sft, World, as_watched_rank, row, run_sft, watched, write_rows

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP4": (4, {}),
    "TP2": (2, {TP: 2}),
    "TP2+SP": (2, {TP: 2, "sequence_parallel": True}),
    "PP2": (2, {PP: 2}),
    "CP2": (2, {CP: 2}),
    "TP2xPP2": (4, {TP: 2, PP: 2}),
    "TP2xDP2": (4, {TP: 2}),
    "PP2xDP2": (4, {PP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "CP2xTP2+SP": (4, {CP: 2, TP: 2, "sequence_parallel": True}),
}
QUICK = ("TP2+SP", "PP2")
RECOMPUTES: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
TRAINING = {"train_iters": 4, "save_interval": 2, "lr_warmup_fraction": 0.25, "split_dataset_ratio": 0.1}
LONG = {"train_iters": 20, "lr_warmup_fraction": 0.25}
One = Callable[..., Sft]


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> One:
    """``alone(name)``: the training on one rank."""

    @cache
    def train(long: bool) -> Sft:
        return run_sft(world, tmp_path_factory.mktemp("alone"), **(LONG if long else TRAINING))

    return train


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {later: loss for later, loss in losses.items() if later > step}


def assert_same_course(run: Sft, expected: Sft, step: int = 0) -> None:
    assert run.losses == pytest.approx(after(expected.losses, step), abs=1e-5)
    norms = after(expected.values("grad_norm"), step)
    assert run.values("grad_norm") == pytest.approx(norms, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_layout_trains_resumes_and_exports_as_one_rank(
    name: str, alone: One, world: World, tmp_path: Path
) -> None:
    ranks, sizes = LAYOUTS[name]
    one = alone(False)
    run = run_sft(world, tmp_path / "run", ranks, **TRAINING, **sizes)
    assert_same_course(run, one)
    assert run.values("eval_loss") == pytest.approx(one.values("eval_loss"), abs=1e-5)
    assert all(verify(run.checkpoint(step)).ok for step in run.steps_saved)

    resumed = run_sft(world, tmp_path / "resumed", ranks, load=run.checkpoint(2), **TRAINING, **sizes)
    assert resumed.losses == after(run.losses, 2)
    there = run_sft(world, tmp_path / "there", ranks, load=one.checkpoint(2), **TRAINING, **sizes)
    assert_same_course(there, one, step=2)
    back = run_sft(world, tmp_path / "back", load=run.checkpoint(2), **TRAINING)
    assert_same_course(back, one, step=2)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_twenty_steps_of_a_layout_are_those_of_one_rank(
    name: str, recompute: str, alone: One, world: World, tmp_path: Path
) -> None:
    ranks, sizes = LAYOUTS[name]
    run = run_sft(world, tmp_path / "run", ranks, **{**LONG, **RECOMPUTES[recompute], **sizes})
    assert_same_course(run, alone(True))


def test_weights_only_checkpoint_of_a_layout_is_loaded_by_another(
    alone: One, world: World, tmp_path: Path
) -> None:
    """Its weights are in safetensors alone."""
    ranks, sizes = LAYOUTS["TP2+SP"]
    light = {"no_save_optim": True, "no_save_rng": True, "max_shard_size": "500KB"}
    run = run_sft(world, tmp_path / "run", ranks, **TRAINING, **sizes, **light)
    assert_same_course(run, alone(False))
    assert len(list(run.checkpoint(4).glob("model-*-of-*.safetensors"))) > 3
    other, there = LAYOUTS["PP2"]
    tuned = run_sft(world, tmp_path / "a", other, load=run.checkpoint(4), finetune=True, **TRAINING, **there)
    exported = run_sft(world, tmp_path / "b", other, model=run.checkpoint(4), **TRAINING, **there)
    assert tuned.losses == exported.losses


def test_ranks_that_can_not_be_shared_out_are_refused(world: World, tmp_path: Path) -> None:
    run = run_sft(world, tmp_path / "run", 2, tensor_model_parallel_size=4, train_iters=1, ends_well=False)
    assert set(run.exit_codes) == {2}
    assert "2 ranks (NPROC_PER_NODE x NNODES), 4 for one copy of the model" in run.outputs[0]
    assert "start 4 ranks" in run.outputs[0]


def test_split_that_the_model_does_not_allow_is_refused(world: World, tmp_path: Path) -> None:
    run = run_sft(world, tmp_path / "run", 4, pipeline_model_parallel_size=4, train_iters=1, ends_well=False)
    assert set(run.exit_codes) == {2}
    assert "too few layers for the vision tower's deepstack features" in run.outputs[0]
    assert "the nearest is 2" in run.outputs[0]


@pytest.mark.parametrize("name", ["TP2", "PP2", "CP2"])
def test_sizes_decide_how_the_model_and_its_work_are_shared_out(
    name: str, world: World, tmp_path: Path
) -> None:
    ranks, sizes = LAYOUTS[name]
    run = run_sft(world, tmp_path / "run", ranks, train_iters=1, global_batch_size=2, **sizes)
    assert run.steps_saved == [1]  # of one micro batch for all ranks: two data-parallel ranks could not
    index = Checkpoint(LocalStore(run.checkpoint(1))).tensors(TORCH_DIST)
    qkv = "language_model.decoder.layers.self_attention.linear_qkv.weight"
    assert {record.box.sizes[1] for record in index[qkv]} == {128 if name == "TP2" else 256}
    layers: dict[str, set[int]] = defaultdict(set)
    for key, records in index.items():
        for record in records if ".layers." in key else []:
            layers[record.file].add(record.box.offsets[0])
    assert (sorted(map(sorted, layers.values())) == [[0, 1], [2, 3]]) == (name == "PP2")


def test_sequence_parallel_ranks_take_less_memory_for_the_same_loss(world: World, tmp_path: Path) -> None:
    rows = [row("?", f"{number} and a long answer " * 30) for number in range(8)]
    data = write_rows(tmp_path / "long.jsonl", rows)
    runs = [
        run_sft(
            world,
            tmp_path / name,
            2,
            entry=as_watched_rank,
            dataset=data,
            micro_batch_size=8,
            train_iters=2,
            **LAYOUTS[name][1],
        )
        for name in ("TP2", "TP2+SP")
    ]
    whole, shared = runs
    assert shared.losses == pytest.approx(whole.losses, abs=1e-5)
    assert watched(shared).peak_bytes < watched(whole).peak_bytes * 0.95
