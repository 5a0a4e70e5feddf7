"""Every flag and variable of the reported script does what its description says, seen from outside."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST
from landfall.format.unpickle import load_object
from landfall.store.local import LocalStore
from tests.sft.trainer import (
    Sft,
    World,
    as_watched_rank,
    picture,
    row,
    run_sft,
    saved_tensors,
    watched,
    write_rows,
)

SCHEDULE = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_fraction": 0.25}
Train = Callable[..., Sft]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """All safetensors of a folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def common_of(checkpoint: Path) -> dict[str, object]:
    opened = Checkpoint(LocalStore(checkpoint))
    name = next(name for name in opened.manifest.published if name.endswith("common.pt"))
    return dict(load_object(opened.read_file(name), name))


def part_of(name: str) -> str:
    """The part of the model that a tensor of either format belongs to."""
    if "visual." not in name:
        return "llm"
    return "aligner" if "merger" in name else "vit"


def num_rows_and_tokens(run: Sft) -> tuple[int, int]:
    """Training rows, and the tokens of the longest of them, as the run said at its start."""
    rows = re.search(r"rows read: (\d+) to train on", run.outputs[0])
    longest = re.search(r"a row, at most (\d+)", run.outputs[0])
    assert rows and longest, run.outputs[0]
    return int(rows[1]), int(longest[1])


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Sft:
    """36 rows, 4 steps, under the names of 3.x."""
    save = tmp_path_factory.mktemp("plain")
    intervals = {"save_interval": 3, "eval_interval": 2}
    return run_sft(world, save, split_dataset_ratio=0.25, max_epochs=1, **intervals, **SCHEDULE)


@pytest.fixture(scope="module")
def renamed(world: World, plain: Sft, tmp_path_factory: pytest.TempPathFactory) -> Sft:
    """The same under the names of 4.x, with other things to save, worker processes, and from the cache."""
    save = tmp_path_factory.mktemp("renamed")
    old = dict.fromkeys(("save", "save_interval", "log_interval", "num_workers"))
    new = {
        "output_dir": save,
        "num_train_epochs": 1,
        "save_steps": 3,
        "eval_steps": 2,
        "logging_steps": 2,
        "dataloader_num_workers": 2,
        "tuner_type": "full",
    }
    light = {"no_save_optim": True, "no_save_rng": True, "add_version": False, "max_shard_size": "2MB"}
    return run_sft(
        world,
        save,
        entry=as_watched_rank,
        load_from_cache_file=True,
        split_dataset_ratio=0.25,
        **old,
        **new,
        **light,
        **SCHEDULE,
    )


def test_epochs_and_batch_size_decide_the_number_of_steps(plain: Sft) -> None:
    assert list(plain.losses) == [1, 2, 3, 4]  # 36 rows, 8 a step, what is left over is not trained on
    assert plain.losses[4] < plain.losses[1]


def test_rates_are_those_of_warmup_and_cosine(plain: Sft) -> None:
    decayed = [1e-4 + 0.9e-3 * (1 + math.cos(math.pi * step / 3)) / 2 for step in range(4)]
    assert list(plain.values("learning_rate").values()) == pytest.approx(decayed)


def test_intervals_decide_when_is_saved_and_evaluated(plain: Sft) -> None:
    assert plain.steps_saved == [3, 4]  # the end is always saved
    assert list(plain.values("eval_loss")) == [2, 4]


def test_split_ratio_sets_that_share_aside(plain: Sft, world: World) -> None:
    assert num_rows_and_tokens(plain)[0] == 36
    aside = [json.loads(line) for line in (plain.folder / "val_dataset.jsonl").read_text().splitlines()]
    answers = {json.loads(line)["messages"][1]["content"] for line in world.data.read_text().splitlines()}
    assert len(aside) == 12
    assert {row["messages"][1]["content"] for row in aside} <= answers


def test_names_of_4x_and_worker_processes_train_the_same(plain: Sft, renamed: Sft) -> None:
    assert renamed.losses == {step: plain.losses[step] for step in (1, 2, 4)}  # logged every second step
    assert renamed.values("eval_loss") == plain.values("eval_loss")
    assert renamed.steps_saved == [3, 4]
    assert watched(renamed).has_workers


def test_without_version_the_save_folder_is_the_run_folder(plain: Sft, renamed: Sft) -> None:
    assert (renamed.save / "checkpoint-4").is_dir() and (renamed.save / "args.json").exists()
    assert re.fullmatch(r"v0-\d{8}-\d{6}", plain.folder.name)


def test_shard_size_bounds_the_files(plain: Sft, renamed: Sft) -> None:
    shards = list(renamed.checkpoint(4).glob("*.safetensors"))
    assert len(shards) > 1 and max(shard.stat().st_size for shard in shards) < 2.1e6
    whole, split = exported(plain.checkpoint(4)), exported(renamed.checkpoint(4))
    assert whole.keys() == split.keys() and all(torch.equal(t, split[name]) for name, t in whole.items())
    assert (renamed.checkpoint(4) / "model.safetensors.index.json").exists()


def test_without_optimizer_and_random_state_weights_are_saved_once(plain: Sft, renamed: Sft) -> None:
    whole, light = saved_tensors(plain.checkpoint(4)), saved_tensors(renamed.checkpoint(4))
    assert light == {}  # as ms-swift: the weights are in the safetensors
    assert any(name.startswith("optimizer.") for name in whole)
    full, lean = common_of(plain.checkpoint(4)), common_of(renamed.checkpoint(4))
    assert {"optimizer", "opt_param_scheduler"} <= full.keys()
    assert not {"optimizer", "opt_param_scheduler"} & lean.keys()
    for run, has_random_state in ((plain, True), (renamed, False)):
        objects = Checkpoint(LocalStore(run.checkpoint(4))).objects(TORCH_DIST)
        assert any(name.startswith("rng_state") for name in objects) == has_random_state


def test_cache_is_used_only_when_asked_for(renamed: Sft, sft: Train) -> None:
    assert "Reading train.jsonl" not in renamed.outputs[0]
    assert "Reading train.jsonl" in sft(train_iters=1).outputs[0]  # of the same rows, which are there


@pytest.mark.parametrize("part", ["llm", "vit", "aligner"])
def test_frozen_part_stays_as_it_is_and_out_of_the_optimizer(part: str, world: World, sft: Train) -> None:
    freeze = {f"freeze_{name}": name == part for name in ("llm", "vit", "aligner")}
    checkpoint = sft(train_iters=1, **freeze).checkpoint(1)

    before, after = exported(world.model), exported(checkpoint)
    changed = {part_of(name) for name, t in after.items() if not torch.equal(t, before[name].float())}
    kept = {part_of(name) for name in saved_tensors(checkpoint) if not name.startswith("optimizer.")}
    state = "optimizer.state.exp_avg."
    with_state = {part_of(name) for name in saved_tensors(checkpoint, state)}
    others = {"llm", "vit", "aligner"} - {part}
    assert (changed, with_state, kept) == (others, others, {*others, part})


def test_without_safetensors_weights_are_in_the_megatron_files(sft: Train) -> None:
    run = sft(train_iters=1, save_safetensors=False, no_save_optim=True)
    assert list(run.checkpoint(1).rglob("*.safetensors")) == []
    names = saved_tensors(run.checkpoint(1)).keys()
    assert "language_model.embedding.word_embeddings.weight" in names
    assert not any(name.startswith("optimizer.") for name in names)


def test_bf16_computes_in_it_and_keeps_main_parameters_in_float32(plain: Sft, sft: Train) -> None:
    run = sft(train_iters=4, split_dataset_ratio=0.25, bf16=True, **SCHEDULE)
    assert {t.dtype for t in exported(run.checkpoint(4)).values()} == {torch.bfloat16}
    main = saved_tensors(run.checkpoint(4), "optimizer.state.")
    assert {t.dtype for t in main.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in main.items() if ".param." in name)
    assert run.losses != plain.losses
    assert list(run.losses.values()) == pytest.approx(list(plain.losses.values()), abs=0.03)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_gradients_are_clipped_to_the_limit(limit: float, sft: Train) -> None:
    run = sft(train_iters=1, clip_grad=limit)
    unclipped = run.values("grad_norm")[1]
    assert unclipped > 1
    means = saved_tensors(run.checkpoint(1), "optimizer.state.exp_avg.")
    norm = math.sqrt(sum(float(mean.square().sum()) for mean in means.values())) / 0.1  # 1 - beta1
    assert norm == pytest.approx(limit or unclipped, rel=1e-4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 rows with a picture of 64 tokens; line 3 has 80 words more (a token each), line 5 is blank."""
    folder = tmp_path_factory.mktemp("large")
    rows = []
    for number in range(16):
        image = picture(folder / f"{number}.png", 256, seed=number)
        question = "<image>What is it?" + (" digit" * 80 if number == 2 else "")
        rows.append(row(question, str(number), image))
    return write_rows(folder / "large.jsonl", [*rows[:4], "", *rows[4:]])


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LEAN = {
    "full recomputation": FULL,
    "vision checkpointing": {"vit_gradient_checkpointing": True},
    "smaller micro batches": {"micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def wide(world: World, large: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains on rows that need much more memory than parameters and optimizer do, and watches it."""

    def train(**flags: object) -> Sft:
        given = {"micro_batch_size": 8, "train_iters": 2, "save_safetensors": False, **flags}
        save = tmp_path_factory.mktemp("wide")
        return run_sft(world, save, dataset=large, entry=as_watched_rank, **given)

    return train


@pytest.fixture(scope="module")
def kept(wide: Train) -> Sft:
    return wide()


@pytest.mark.parametrize("way", LEAN)
def test_lean_way_takes_less_memory_for_the_same_loss(way: str, wide: Train, kept: Sft) -> None:
    lean = wide(**LEAN[way])
    assert watched(lean).peak_bytes < 0.85 * watched(kept).peak_bytes
    if "micro_batch_size" in LEAN[way]:  # sums in another order
        assert list(lean.losses.values()) == pytest.approx(list(kept.losses.values()), abs=1e-5)
    else:
        assert lean.losses == kept.losses


def test_fused_loss_is_the_same(wide: Train, kept: Sft) -> None:
    fused = wide(cross_entropy_loss_fusion=True)
    assert watched(fused).has_fused_loss and not watched(kept).has_fused_loss
    assert list(fused.losses.values()) == pytest.approx(list(kept.losses.values()), abs=1e-5)


@pytest.mark.case("f01")
def test_images_are_bounded_and_long_rows_left_out_by_line(large: Path, kept: Sft, sft: Train) -> None:
    assert num_rows_and_tokens(kept) == (16, 64 + 21 + 80)
    bounded = sft(dataset=large, train_iters=1, env={"IMAGE_MAX_TOKEN_NUM": "16"}, max_length=40)
    assert num_rows_and_tokens(bounded) == (15, 16 + 22)
    assert f"{large}:3: {16 + 21 + 80} tokens, max_length 40" in bounded.outputs[0]


@pytest.mark.case("f01")
def test_long_row_is_cut_beside_its_image_never_inside(large: Path, sft: Train) -> None:
    cut = sft(dataset=large, train_iters=1, max_length=100, truncation_strategy="left")
    num_rows, longest = num_rows_and_tokens(cut)
    assert num_rows == 16 and longest <= 100
    assert "1 overlong rows shortened" in cut.outputs[0]
    assert f"{large}:3: {64 + 21 + 80} tokens, max_length 100; 1 of 1 images cut off" in cut.outputs[0]


def test_rows_are_prepared_by_as_many_processes_as_asked_for(tmp_path: Path, sft: Train) -> None:
    rows = write_rows(tmp_path / "text.jsonl", [row(f"{number}?", str(number)) for number in range(513)])
    cache = tmp_path / "cache"
    sft(dataset=rows, dataset_num_proc=3, train_iters=1, env={"LANDFALL_CACHE": str(cache)})
    assert len(list(cache.rglob("*_of_00003.arrow"))) == 3
