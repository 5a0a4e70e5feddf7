"""What is compared, and in which order."""

from __future__ import annotations

from landfall.repro.cases import NUM_TIMED, WRITERS, plan_launches


def test_on_a_gpu_every_step_has_fresh_ranks() -> None:
    *single, race = plan_launches(WRITERS, "/x", on_gpu=True)
    assert [len(launch.steps) for launch in single] == [1] * 16
    assert {step.writer for step in race.steps} == {"dcp_gloo", "landfall"}
    assert len(race.steps) == 2 * (NUM_TIMED + 1)


def test_saves_come_before_the_loads_that_need_them() -> None:
    for on_gpu in (True, False):
        written: set[str] = set()
        for launch in plan_launches(WRITERS, "/x", on_gpu=on_gpu):
            for step in launch.steps:
                written.add(step.folder)
                assert step.action == "save" or step.sources[0] in written


def test_a_load_on_the_full_card_falls_back_to_what_was_saved_with_room() -> None:
    steps = {
        step.name: step for launch in plan_launches(["stock"], "/x", on_gpu=True) for step in launch.steps
    }
    assert steps["stock/full/load"].sources == ("/x/stock-full", "/x/stock-roomy")
    assert steps["stock/roomy/load"].sources == ("/x/stock-roomy", "/x/stock-full")


def test_on_a_cpu_what_may_hang_is_kept_from_what_gets_through() -> None:
    first, second = plan_launches(WRITERS, "/x", on_gpu=False)
    assert {step.writer for step in first.steps} == {"stock", "dcp_nccl"}
    assert {step.writer for step in second.steps} == {"dcp_gloo", "landfall"}


def test_names_of_steps_are_unique() -> None:
    for on_gpu in (True, False):
        names = [step.name for launch in plan_launches(WRITERS, "/x", on_gpu=on_gpu) for step in launch.steps]
        assert len(names) == len(set(names))


def test_one_writer_alone_is_planned_alone() -> None:
    for on_gpu in (True, False):
        launches = plan_launches(["stock"], "/x", on_gpu=on_gpu)
        assert sum(len(launch.steps) for launch in launches) == 4
