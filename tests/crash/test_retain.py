"""Old checkpoints go only when a newer one is committed, and half of one is never taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from landfall.engine.latest import newest
from landfall.engine.protocol import Step
from landfall.engine.retain import RETIRED, Policy, remove, retain
from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.errors import LandfallError
from landfall.store.local import LocalStore
from landfall.testing.faults import Recorder, kill_at_step, kill_before_change
from landfall.testing.procs import run_ranks

from .job import contents_of, in_a_child, value_in


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save(contents_of(float(step)), LocalStore(folder / f"checkpoint-{step}"), solo_session(), step=step)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("policy", "best", "left"),
    [
        (Policy(), None, [10, 20, 30, 40, 50]),
        (Policy(limit=2), None, [40, 50]),
        (Policy(limit=1), None, [50]),
        (Policy(limit=1), 20, [20, 50]),
        (Policy(limit=3), 10, [10, 40, 50]),
        (Policy(keep_every=20), None, [20, 40, 50]),
        (Policy(keep_every=20), 30, [20, 30, 40, 50]),
        (Policy(limit=2, keep_every=20), None, [40, 50]),
    ],
)
def test_what_is_kept_follows_the_policy(
    tmp_path: Path, policy: Policy, best: int | None, left: list[int]
) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, 50)
    removed = retain(tmp_path, policy, best)
    assert kept(tmp_path) == left
    assert [int(path.name.partition("-")[2]) for path in removed] == sorted({10, 20, 30, 40, 50} - set(left))


@pytest.mark.case("c03")
def test_checkpoint_stays_until_the_next_one_is_committed(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    seen = []

    def look() -> None:
        retain(tmp_path, Policy(limit=1))
        seen.append((kept(tmp_path), newest(tmp_path).step))

    for step in (Step.WRITTEN, Step.INDEXED, Step.VISIBLE):
        kill_at_step(step, act=look)
    save_steps(tmp_path, 4)
    assert seen == [([2, 4], 2)] * 3  # folder 4 is there, and is not counted
    retain(tmp_path, Policy(limit=1))
    assert kept(tmp_path) == [4] and value_in(tmp_path / "checkpoint-4") == 4.0


def kill_in_every_removal(folder: str) -> tuple[int, set[str]]:
    number, root = 0, Path(folder)
    with Recorder() as recorder:
        save_steps(root / "0", 1)
        remove(root / "0" / "checkpoint-1")
    while True:
        number += 1
        run = root / str(number)
        save_steps(run, 1, 2)
        status = in_a_child(
            lambda run=run, number=number: (kill_before_change(number), retain(run, Policy(limit=1)))
        )
        assert newest(run).step == 2 and value_in(run / "checkpoint-2") == 2.0
        try:  # whole, or none
            assert value_in(run / "checkpoint-1") == 1.0
        except LandfallError as error:
            assert "no committed checkpoint" in str(error)
        retain(run, Policy(limit=1))
        assert kept(run) == [2]
        if status == 0:
            return number - 1, {step.name for step, _ in recorder.steps}


def test_kill_in_a_removal_leaves_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    [(num_changes, steps)] = run_ranks(kill_in_every_removal, 1, str(tmp_path))
    assert num_changes > 10
    assert {Step.RETIRED.name, Step.DELETED.name} <= steps


def test_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoint-1" / "landfall.json").rename(tmp_path / "checkpoint-1" / RETIRED)
    retain(tmp_path, Policy(limit=5))
    assert kept(tmp_path) == [2]
