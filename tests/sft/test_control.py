"""A run that is asked to end saves first, on all ranks at the same step, and says so by its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from landfall.engine.latest import newest
from landfall.engine.verify import verify
from landfall.testing.procs import Ranks
from tests.sft.trainer import Sft, World, committed_steps, flags, left_in, run_sft, start_sft, wait_for

Train = Callable[..., Sft]
LONG = {"train_iters": 400, "save_interval": 1000, "lr_decay_style": "constant"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def running(world: World, out: Path, **given: Any) -> Ranks:
    ranks = start_sft(world, out, 2, **LONG, **given)
    wait_for(lambda: out.exists() and left_in(out).log)
    return ranks


def send(ranks: Ranks, rank: int, number: int) -> None:
    pid = ranks.processes[rank].pid
    assert pid is not None
    os.kill(pid, number)


def goes_on_as_if_undisturbed(world: World, run: Sft, tmp_path: Path) -> None:
    [step] = committed_steps(run.folder)
    assert newest(run.folder).step == step and verify(run.checkpoint(step)).ok
    assert list(run.losses)[-1] == step
    length = {**LONG, "train_iters": step + 2}
    resumed = run_sft(world, tmp_path / "resumed", 2, load=run.folder, **length)
    whole = run_sft(world, tmp_path / "whole", 2, **length)
    assert resumed.losses == {later: whole.losses[later] for later in (step + 1, step + 2)}


@pytest.mark.case("g03")
@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
        (signal.SIGUSR1, 0),
    ],
)
def test_signal_to_one_rank_saves_and_ends_all(
    number: int, rank: int, world: World, out: Path, tmp_path: Path
) -> None:
    with running(world, out) as ranks:
        send(ranks, rank, number)
        run = left_in(out, ranks, ranks.exit_codes(60))
    assert run.exit_codes == [128 + number] * 2, run.outputs
    assert f"because {signal.Signals(number).name} was received" in run.outputs[0]
    if number == signal.SIGTERM and rank:
        goes_on_as_if_undisturbed(world, run, tmp_path)
    else:
        assert committed_steps(run.folder) == [list(run.losses)[-1]]


@pytest.mark.case("g03")
def test_signal_during_an_evaluation_cuts_it_short_and_saves(world: World, out: Path) -> None:
    long = {"val_dataset": world.data, "eval_interval": 1, "eval_iters": 4000}
    with running(world, out, **long) as ranks:
        time.sleep(0.5)
        send(ranks, 1, signal.SIGTERM)
        run = left_in(out, ranks, ranks.exit_codes(60))
    assert run.exit_codes == [143, 143], run.outputs
    assert committed_steps(run.folder) == [1] and not run.values("eval_loss")


def test_time_limit_saves_and_ends_with_its_own_code(sft: Train) -> None:
    run = sft(ranks=2, exit_duration_in_mins=0.02, ends_well=False, **LONG)
    assert run.exit_codes == [3, 3], run.outputs
    assert "because --exit_duration_in_mins is over" in run.outputs[0]
    assert committed_steps(run.folder) == [list(run.losses)[-1]]


@pytest.mark.slow
@pytest.mark.case("g03")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_the_launcher_saves_and_is_its_exit_code(number: int, world: World, out: Path) -> None:
    environment = {
        **os.environ,
        "NPROC_PER_NODE": "2",
        "LANDFALL_CACHE": str(world.cache),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    entry = "from landfall.cli.main import run; run()"
    command = [sys.executable, "-c", entry, "sft", *flags(world, out, LONG)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: out.exists() and left_in(out).log, 120)
    process.send_signal(number)
    told, errors = process.communicate(timeout=120)
    run = left_in(out)
    assert process.returncode == 128 + number, told + errors
    assert committed_steps(run.folder) == [list(run.losses)[-1]]


def test_old_checkpoints_go_and_the_best_stays(world: World, sft: Train) -> None:
    every = {"train_iters": 5, "save_interval": 1, "eval_interval": 1, "eval_iters": 1}
    best = {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is the worst model
    run = sft(val_dataset=world.data, save_total_limit=2, **best, **every)
    assert run.steps_saved == [1, 5] and verify(run.checkpoint(5)).ok
    assert max(run.values("eval_loss").items(), key=lambda item: item[1])[0] == 1
    plain = sft(save_retain_interval=2, train_iters=5, save_interval=1)
    assert plain.steps_saved == [2, 4, 5]


def test_save_that_fails_once_is_tried_again(world: World, out: Path) -> None:
    out.mkdir()
    with start_sft(world, out, 2, train_iters=60, save_interval=20, add_version=False) as ranks:
        wait_for(lambda: left_in(out).log)
        (out / "checkpoint-20").write_text("in the way of the folder")
        wait_for(lambda: "NOT SAVED at step 20; again in 1 s." in ranks.output(0))
        (out / "checkpoint-20").unlink()
        run = left_in(out, ranks, ranks.exit_codes(60))
    assert run.exit_codes == [0, 0], run.outputs
    assert committed_steps(out) == [20, 40, 60]


def test_save_that_fails_stops_the_run_if_asked(world: World, out: Path) -> None:
    out.mkdir()
    stop = {"on_save_error": "stop", "add_version": False}
    with start_sft(world, out, 2, train_iters=60, save_interval=20, **stop) as ranks:
        wait_for(lambda: left_in(out).log)
        (out / "checkpoint-20").write_text("in the way of the folder")
        run = left_in(out, ranks, ranks.exit_codes(60))
    assert run.exit_codes == [1, 1] and list(run.losses)[-1] == 20
    assert all("The checkpoint could not be written" in output for output in run.outputs)


def test_save_of_an_unchanged_model_is_said_loudly(sft: Train) -> None:
    frozen = {"lr": 1e-60, "min_lr": 0.0, "no_save_optim": True, "bf16": True}
    run = sft(train_iters=2, save_interval=1, **frozen)
    assert (
        "WARNING: checkpoint-2 is like the one before; no tensor has changed since step 1" in run.outputs[0]
    )
    assert '"unchanged_since": 1' in (run.checkpoint(2) / "landfall.json").read_text()
