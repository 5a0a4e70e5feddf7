"""What goes wrong while a run trains: it is told by its name, and no save suffers from it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from landfall.engine.latest import newest
from landfall.engine.verify import verify
from landfall.testing.procs import Ranks
from tests.sft.trainer import (
    Sft,
    World,
    committed_steps,
    left_in,
    picture,
    row,
    start_sft,
    wait_for,
    write_rows,
)

Train = Callable[..., Sft]
LONG = {"train_iters": 24, "save_interval": 12}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def running(world: World, out: Path, **flags: Any) -> Ranks:
    """Two ranks that have trained at least one step."""
    ranks = start_sft(world, out, 2, **flags)
    wait_for(lambda: out.exists() and left_in(out).log)
    return ranks


def end_of(ranks: Ranks, out: Path) -> Sft:
    with ranks:
        return left_in(out, ranks, ranks.exit_codes(60))


@pytest.mark.parametrize("lost", [0, 1], ids=["on rank 0", "on rank 1"])
def test_evaluation_that_fails_on_one_rank_prevents_no_save(
    lost: int, world: World, tmp_path: Path, out: Path
) -> None:
    images = [picture(tmp_path / f"{number}.png", 64, number) for number in range(4)]
    rows = write_rows(tmp_path / "val.jsonl", [row("<image>?", "1", image) for image in images])
    ranks = running(world, out, val_dataset=rows, **LONG)
    images[lost].unlink()

    run = end_of(ranks, out)

    assert run.exit_codes == [0, 0], run.outputs
    assert run.steps_saved == [12, 24] and verify(run.checkpoint(24)).ok
    assert "FAILED: the evaluation after step 24" in run.outputs[0]
    assert f"rank {lost}: An image can't be read" in run.outputs[0] and str(images[lost]) in run.outputs[0]
    assert 24 in run.losses and 24 not in run.values("eval_loss")


def test_row_that_is_lost_stops_the_run_and_is_named(world: World, tmp_path: Path, out: Path) -> None:
    image = picture(tmp_path / "lost.png", 64, 0)
    rows = write_rows(tmp_path / "lost.jsonl", [row("<image>?", str(number), image) for number in range(16)])
    ranks = running(world, out, dataset=rows, save_interval=1, train_iters=400)
    image.unlink()

    run = end_of(ranks, out)

    assert 0 not in run.exit_codes and 2 not in run.exit_codes  # the input was good when the run began
    told = "".join(run.outputs)
    assert "Training stopped after step" in told and f"{rows}:" in told and str(image) in told
    assert newest(out).step in run.losses


def test_log_that_cannot_be_written_stops_nothing(world: World, out: Path) -> None:
    ranks = running(world, out, **LONG)
    (left_in(out).folder / "images").write_text("in the way of the plots")

    run = end_of(ranks, out)

    assert run.exit_codes == [0, 0], run.outputs
    assert "FAILED: finishing the log" in run.outputs[0]
    assert verify(run.checkpoint(24)).ok


@pytest.fixture
def limited() -> Iterator[Callable[[Ranks, int], None]]:
    """``limited(ranks, num_bytes)``: no file of rank 1 can grow beyond that, as if its disk were full."""
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of another process are Linux's")

    def limit(ranks: Ranks, num_bytes: int) -> None:
        pid = ranks.processes[1].pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    yield limit


@pytest.mark.case("a06")
def test_save_that_fails_is_told_and_the_next_one_lands(
    limited: Callable[[Ranks, int], None], world: World, out: Path
) -> None:
    ranks = running(world, out, train_iters=400, save_interval=2, on_save_error="continue")
    wait_for(lambda: committed_steps(left_in(out).folder))
    limited(ranks, 256 << 10)
    wait_for(lambda: "NOT SAVED" in ranks.output(0))
    before = committed_steps(left_in(out).folder)
    limited(ranks, resource.RLIM_INFINITY)
    wait_for(lambda: committed_steps(left_in(out).folder)[-1] > before[-1])
    told = ranks.output(0)
    ranks.close()

    assert "rank 1" in told and "EFBIG" in told and "bytes free there" in told
    run = left_in(out)
    failed = {int(line.split()[4].rstrip(";")) for line in told.splitlines() if line.startswith("NOT SAVED")}
    assert failed and not failed & set(committed_steps(run.folder))
    assert all(verify(run.checkpoint(step)).ok for step in committed_steps(run.folder))
    assert os.listdir(run.checkpoint(min(failed))) == [] or not run.checkpoint(min(failed)).exists()
