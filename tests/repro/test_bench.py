"""What a rank does, on real ranks behind the tripwire."""

from __future__ import annotations

from pathlib import Path

import pytest

from landfall.repro.cases import Launch, Step, Writer, plan_launches
from landfall.repro.outcome import Attempt
from landfall.testing.procs import run_ranks

from .ranks_of_a_bench import take_all, train


def steps_of(writer: Writer, folder: Path) -> Launch:
    launches = plan_launches([writer], str(folder), on_gpu=False)
    return Launch([step for launch in launches for step in launch.steps if step.repeat <= 1])


def run(writer: Writer, folder: Path) -> list[dict[str, Attempt]]:
    return run_ranks(take_all, 2, steps_of(writer, folder), str(folder))


def test_training_learns_and_leaves_the_same_weights_on_all_ranks() -> None:
    (losses, evaluation, sums, shape), *others = run_ranks(train, 3)
    assert losses[-1] < losses[0] and evaluation < losses[0]
    assert shape == [2731, 1024]  # a third of 8192 rows, padded
    for other in others:
        assert other[:3] == (losses, evaluation, sums)


def test_stock_saves_until_the_tripwire_is_armed_and_then_fails_in_gather_object(tmp_path: Path) -> None:
    for attempts in run("stock", tmp_path):
        roomy, full = attempts["stock/roomy/save"], attempts["stock/full/save"]
        assert roomy.ended == "done" and (roomy.collectives or {})["gather"] == 2
        assert attempts["stock/roomy/load"].intact
        assert full.ended == "failed" and full.failure is not None
        assert {"save_state_dict_async_plan", "gather_object"} <= set(full.failure.functions)
        assert full.failure.message.startswith("NCCL Error 1: unhandled cuda error")
        assert attempts["stock/full/load"].ended == "failed"


@pytest.mark.parametrize("writer", ["landfall", "dcp_gloo"])
def test_what_talks_on_the_cpu_gets_through_without_a_collective(writer: Writer, tmp_path: Path) -> None:
    for attempts in run(writer, tmp_path):
        assert len(attempts) == 5
        assert all(attempt.ended == "done" and attempt.collectives == {} for attempt in attempts.values())
        assert attempts[f"{writer}/full/load"].intact and attempts[f"{writer}/full/load"].seconds > 0
        assert attempts[f"{writer}/full/load"].source == str(tmp_path / f"{writer}-full")


def test_a_load_takes_what_was_saved_with_room_where_the_other_save_failed(tmp_path: Path) -> None:
    launch = steps_of("dcp_nccl", tmp_path)
    roomy, _, full, load = launch.steps
    # Not behind the tripwire, where it would fail as the save did.
    load = Step("dcp_nccl", "roomy", "load", sources=load.sources)
    for attempts in run_ranks(take_all, 2, Launch([roomy, full, load]), str(tmp_path)):
        assert attempts["dcp_nccl/full/save"].ended == "failed"
        assert attempts["dcp_nccl/roomy/load"].source == str(tmp_path / "dcp_nccl-roomy")
        assert attempts["dcp_nccl/roomy/load"].intact


def test_a_load_of_other_bytes_is_not_intact(tmp_path: Path) -> None:
    launch = steps_of("dcp_gloo", tmp_path)
    save, load = launch.steps[0], launch.steps[1]
    (saved,) = run_ranks(take_all, 1, Launch([save]), str(tmp_path))
    assert saved[save.name].ended == "done"
    (tmp_path / "again").mkdir()
    noted = tmp_path / "dcp_gloo-roomy.rank0.json"
    noted.write_text(noted.read_text().replace('layers.3.weight": "', 'layers.3.weight": "0'))
    (loaded,) = run_ranks(take_all, 1, Launch([load]), str(tmp_path / "again"))
    assert loaded[load.name].ended == "done" and loaded[load.name].intact is False
