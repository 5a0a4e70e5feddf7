"""kill -9 anywhere in a save: what was committed before is there, or what is committed now; nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from landfall.engine.latest import newest
from landfall.engine.protocol import Step
from landfall.errors import NoCheckpointError
from landfall.testing.procs import run_ranks, start_ranks

from .job import (
    AFTER_FAILURE,
    kill_before_every_change,
    leftovers,
    save_and_die,
    save_well,
    steps_of_a_save,
    value_in,
)

REMOVAL = (Step.RETIRED, Step.DELETED)
"""Reached by removing a checkpoint: see test_retain.py."""
AFTER_COMMIT = (Step.COMMITTED, Step.CLEARED, Step.ANSWERED)
ON_RANK_0_ONLY = tuple(step for step in Step if step.value.startswith("rank 0"))
SAVING = [step for step in Step if step not in REMOVAL]


@pytest.mark.parametrize("again", [False, True], ids=["new folder", "over an old one"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "that fails and is undone"])
def test_kill_before_any_change_to_a_file_leaves_one_whole_checkpoint(
    tmp_path: Path, again: bool, fails: bool
) -> None:
    [(num_changes, found)] = run_ranks(kill_before_every_change, 1, str(tmp_path), again, fails)
    assert num_changes > 35
    before, after = (1.0 if again else None), 2.0
    commit = found.index(after) if after in found else len(found)
    assert fails == (after not in found)
    assert found == [before] * commit + [after] * (len(found) - commit)


def test_every_step_is_passed_by_a_save_that_is_tested(tmp_path: Path) -> None:
    [attempts] = run_ranks(steps_of_a_save, 1, str(tmp_path))
    passed = {name for steps in attempts for name, _ in steps}
    assert passed == {step.name for step in SAVING}


def kill(folder: Path, step: Step, victims: list[int], again: bool, occurrence: int = 1) -> None:
    """Kill ``victims`` of two ranks at ``step``; check what is left; start anew and save again."""
    with start_ranks(save_and_die, 2, str(folder), step, occurrence, victims, again) as ranks:
        codes = ranks.exit_codes(60)
    assert -9 in codes, f"nobody reached {step}"
    if step in AFTER_COMMIT:
        assert value_in(folder) == 2.0
    elif again:
        assert value_in(folder) == 1.0
    else:
        with pytest.raises(NoCheckpointError):
            newest(folder)
    run_ranks(save_well, 2, str(folder), 3.0)
    assert value_in(folder) == 3.0 and not leftovers(folder)


@pytest.mark.parametrize("step", SAVING, ids=lambda step: step.name)
def test_kill_of_all_ranks_over_an_old_checkpoint_leaves_it_or_the_new_one(
    tmp_path: Path, step: Step
) -> None:
    kill(tmp_path, step, [0] if step in ON_RANK_0_ONLY else [0, 1], again=True)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["new folder", "over an old one"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", SAVING, ids=lambda step: step.name)
def test_kill_of_one_rank_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, step: Step, victim: int, again: bool
) -> None:
    if victim == 1 and step in (*ON_RANK_0_ONLY, *AFTER_FAILURE):
        pytest.skip("only rank 0 gets there")
    if not again and step in (Step.SET_ASIDE, Step.RESTORED):
        pytest.skip("there is nothing to set aside in a new folder")
    kill(tmp_path, step, [victim], again)


@pytest.mark.slow
@pytest.mark.parametrize("occurrence", [2, 3, 4])
@pytest.mark.parametrize("step", [Step.SET_ASIDE, Step.PUBLISHED, Step.RESTORED, Step.UNDONE, Step.CLEARED])
def test_kill_between_two_renames_leaves_one_whole_checkpoint(
    tmp_path: Path, step: Step, occurrence: int
) -> None:
    kill(tmp_path, step, [0], again=True, occurrence=occurrence)
