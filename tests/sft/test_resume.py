"""A run that goes on from a checkpoint is the run that never stopped: the same losses, bit for bit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from landfall.engine.verify import verify
from landfall.format.manifest import NAME
from landfall.testing.procs import Ranks
from tests.sft.trainer import (
    Sft,
    World,
    committed_steps,
    left_in,
    read_log,
    row,
    run_sft,
    saved_tensors,
    start_sft,
    step_of,
    wait_for,
    write_rows,
)

STEPS = 8
"""48 rows, 8 a step: the first epoch ends with step 6."""
TRAINING = {"train_iters": STEPS, "save_interval": 2, "lr_warmup_fraction": 0.25}
ENDLESS = {"train_iters": 400, "lr_decay_style": "constant"}
"""For runs that are killed; the rate does not depend on the length, so that shorter runs can go on."""
Train = Callable[..., Sft]
Undisturbed = Callable[[int, bool], Sft]


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """``undisturbed(ranks, bf16)``: a run of STEPS steps that nothing happened to."""

    @cache
    def train(ranks: int, bf16: bool) -> Sft:
        return run_sft(world, tmp_path_factory.mktemp("undisturbed"), ranks, bf16=bf16, **TRAINING)

    return train


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {later: loss for later, loss in losses.items() if later > step}


def assert_same_tensors(one: Path, other: Path) -> None:
    tensors, others = saved_tensors(one), saved_tensors(other)
    assert tensors.keys() == others.keys() and tensors
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])] == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_resumed_run_equals_one_that_never_stopped(
    ranks: int, bf16: bool, undisturbed: Undisturbed, sft: Train
) -> None:
    whole = undisturbed(ranks, bf16)
    resumed = sft(ranks=ranks, bf16=bf16, load=whole.checkpoint(2), **TRAINING)
    assert resumed.losses == after(whole.losses, 2)
    assert resumed.values("learning_rate") == after(whole.values("learning_rate"), 2)
    assert_same_tensors(resumed.checkpoint(STEPS), whole.checkpoint(STEPS))


@pytest.mark.case("b02")
def test_other_number_of_ranks_goes_on_the_same(undisturbed: Undisturbed, sft: Train) -> None:
    losses = undisturbed(1, False).losses
    newest = sft(ranks=4, **TRAINING)
    assert newest.losses == pytest.approx(losses, abs=1e-5)
    for ranks, step in ((2, 2), (1, 4), (2, 6)):
        newest = sft(ranks=ranks, load=newest.checkpoint(step), **TRAINING)
        assert newest.losses == pytest.approx(after(losses, step), abs=1e-5)
    back = sft(ranks=4, load=undisturbed(1, False).checkpoint(6), **TRAINING)
    assert back.losses == pytest.approx(after(losses, 6), abs=1e-5)


@pytest.mark.slow
@pytest.mark.case("b02")
def test_numbers_of_ranks_without_a_common_divisor_go_on_the_same(sft: Train) -> None:
    training = {"micro_batch_size": 1, "global_batch_size": 12, "train_iters": 5, "save_interval": 1}
    two = sft(ranks=2, **training)
    for ranks in (3, 4):
        other = sft(ranks=ranks, load=two.checkpoint(3), **training)
        assert other.losses == pytest.approx(after(two.losses, 3), abs=1e-6)
        back = sft(ranks=2, load=other.checkpoint(4), **training)
        assert back.losses == pytest.approx(after(two.losses, 4), abs=1e-6)


@pytest.mark.case("b08")
def test_run_resumed_at_an_epochs_end_trains_the_epochs_that_follow(tmp_path: Path, sft: Train) -> None:
    rows = write_rows(tmp_path / "eight.jsonl", [row("?", str(number) * number) for number in range(8)])
    training = {"dataset": rows, "global_batch_size": 4, "max_epochs": 3, "save_interval": 2}
    whole = sft(**training)
    resumed = sft(load=whole.checkpoint(2), **training)
    assert list(resumed.losses) == [3, 4, 5, 6]
    assert resumed.losses == after(whole.losses, 2)


def test_flags_of_the_resumed_run_count_and_are_told(undisturbed: Undisturbed, sft: Train) -> None:
    whole = undisturbed(1, False)
    longer = {**TRAINING, "train_iters": 2 * STEPS, "lr": 5e-3, "weight_decay": 0.0}
    resumed = sft(load=whole.checkpoint(STEPS), **longer)
    afresh = sft(**longer)
    assert list(resumed.losses) == list(range(STEPS + 1, 2 * STEPS + 1))
    assert resumed.values("learning_rate") == after(afresh.values("learning_rate"), STEPS)
    for name in ("--lr 0.005", "--weight_decay 0.0", f"--train_iters {2 * STEPS}"):
        assert f"goes on with {name} (was " in resumed.outputs[0]


def test_finetune_starts_at_step_0_from_the_weights_alone(undisturbed: Undisturbed, sft: Train) -> None:
    whole = undisturbed(1, False)
    tuned = sft(load=whole.checkpoint(4), finetune=True, **TRAINING)
    assert list(tuned.losses) == list(range(1, STEPS + 1))
    assert tuned.values("learning_rate") == whole.values("learning_rate")
    assert tuned.losses[1] < whole.losses[1] - 0.1


def test_exported_checkpoint_is_a_model_to_start_from(undisturbed: Undisturbed, sft: Train) -> None:
    checkpoint = undisturbed(1, False).checkpoint(4)
    exported = sft(model=checkpoint, **TRAINING)
    tuned = sft(load=checkpoint, finetune=True, **TRAINING)
    assert exported.losses == tuned.losses


def test_weights_only_checkpoint_goes_on_with_a_fresh_optimizer_if_asked(
    undisturbed: Undisturbed, sft: Train
) -> None:
    light = sft(no_save_optim=True, no_save_rng=True, **TRAINING)
    rates = undisturbed(1, False).values("learning_rate")
    fresh = sft(load=light.checkpoint(4), no_load_optim=True, no_load_rng=True, **TRAINING)
    assert fresh.values("learning_rate") == pytest.approx(after(rates, 4))
    assert fresh.losses[5] == pytest.approx(undisturbed(1, False).losses[5], abs=1e-5)
    assert fresh.losses != after(undisturbed(1, False).losses, 4)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "without metadata": lambda newest: next(newest.rglob(".metadata")).unlink(),
    "cut short": lambda newest: cut(next(newest.rglob("*.distcp"))),
    "one byte changed": lambda newest: change_byte(next(newest.rglob("*.distcp"))),
    "empty": lambda newest: [shutil.rmtree(newest), newest.mkdir()],
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def change_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.case("c01")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_is_skipped_and_named(
    damage: str, undisturbed: Undisturbed, tmp_path: Path, sft: Train
) -> None:
    whole = undisturbed(2, False)
    run = shutil.copytree(whole.folder, tmp_path / "run")
    newest = run / f"checkpoint-{STEPS}"
    DAMAGES[damage](newest)

    resumed = sft(ranks=2, load=run, **TRAINING)

    assert resumed.losses == after(whole.losses, 6)
    told = resumed.outputs[0]
    assert f"skipped {newest}" in told and f"goes on after step 6 from {run}/checkpoint-6" in told, told
    named = sft(ranks=2, load=newest, ends_well=False, **TRAINING)
    assert 0 not in named.exit_codes and str(newest) in named.outputs[0]


def kill_all(ranks: Ranks) -> None:
    for rank in range(len(ranks.processes)):
        ranks.stop(rank)
    for rank in range(len(ranks.processes)):
        ranks.kill(rank)


def test_killed_run_goes_on_as_if_it_had_never_stopped(world: World, tmp_path: Path, sft: Train) -> None:
    out = tmp_path / "输出 🚀"
    with start_sft(world, out, 2, save_interval=2, **ENDLESS) as ranks:
        wait_for(lambda: out.exists() and len(committed_steps(left_in(out).folder)) >= 2)
        kill_all(ranks)
    run = left_in(out)
    saved, log = committed_steps(run.folder)[-1], read_log(run.folder)
    length = {**ENDLESS, "train_iters": max(saved + 2, step_of(log[-1]))}

    again = sft(ranks=2, load=run.folder, save=out, **length)
    whole = sft(ranks=2, **length)

    assert again.folder.name.startswith("v1-") and again.losses == after(whole.losses, saved)
    assert {step_of(entry): entry["loss"] for entry in log}.items() <= whole.losses.items()
    assert all(verify(run.checkpoint(step)).ok for step in committed_steps(run.folder))


@pytest.mark.case("a02")
def test_run_killed_while_it_saves_goes_on_and_replaces_what_was_left(
    world: World, tmp_path: Path, sft: Train
) -> None:
    out = tmp_path / "out"
    with start_sft(world, out, 2, save_interval=2, add_version=False, **ENDLESS) as ranks:
        wait_for(lambda: len(committed_steps(out)) >= 2)
        half = wait_for(lambda: stopped_in_a_save(ranks, out))
        kill_all(ranks)
    saved = committed_steps(out)[-1]
    assert half == saved + 2

    length = {**ENDLESS, "train_iters": half + 2, "save_interval": 2}
    again = sft(ranks=2, load=out, add_version=False, **length)
    whole = sft(ranks=2, save=tmp_path / "whole", **length)

    assert again.losses == whole.losses
    assert committed_steps(out)[-2:] == [half, half + 2]
    for step in (half, half + 2):
        assert verify(again.checkpoint(step)).ok
        files = {path.name for path in again.checkpoint(step).rglob("*.distcp")}
        manifest = json.loads((again.checkpoint(step) / NAME).read_text())
        assert len(files) == 2 and all(manifest["save_id"] in name for name in files)


def stopped_in_a_save(ranks: Ranks, out: Path) -> int:
    """Catch the ranks while a checkpoint is there but not committed, and leave them stopped; 0 if missed."""
    folders = {int(found.name.partition("-")[2]) for found in out.glob("checkpoint-*")}
    half = max(folders - set(committed_steps(out)), default=0)
    if half:
        for rank in range(2):
            ranks.stop(rank)
        time.sleep(0.05)  # until the signals have arrived
        if half in committed_steps(out):
            for rank in range(2):
                ranks.resume(rank)
            return 0
    return half
