"""The exit code is 0 only if stock failed in its known way and ours kept every promise."""

from __future__ import annotations

import msgspec
import pytest

from landfall.repro.outcome import Attempt, Check, Memory, Result
from landfall.repro.verdict import is_as_reported, judge

from .results import ABOUT, IN_GATHER, MIB, as_reported, bad, failure, good


def failing(results: list[Result], damage: tuple[str, ...] = ()) -> list[Check]:
    return [check for check in judge(results, ABOUT, damage, on_gpu=True) if not check.holds]


def replaced(result: Result) -> list[Result]:
    """The good run with one result exchanged."""
    return [result if other.step == result.step else other for other in as_reported()]


def changed(result: Result, **changes: object) -> Result:
    """A result whose last rank did otherwise."""
    *others, last = result.attempts
    attempts: list[Attempt] = [*others, msgspec.structs.replace(last, **changes)]
    return msgspec.structs.replace(result, attempts=attempts)


def test_the_reported_outcome_passes() -> None:
    assert failing(as_reported()) == []


def test_stock_that_saves_on_the_full_card_is_not_as_expected() -> None:
    (check,) = failing(replaced(good("stock", "full", "save")))
    assert "fails on the full GPU" in check.claim and check.seen == "saved"


def test_stock_that_fails_with_room_as_well_proves_nothing() -> None:
    (check,) = failing(replaced(bad("stock", "roomy", "save")))
    assert "while the GPU has room" in check.claim and "gather_object" in check.seen


def test_stock_that_only_hangs_is_not_as_expected() -> None:
    hung = good("stock", "full", "save")
    hung = msgspec.structs.replace(hung, attempts=[Attempt(ended="hung")] * 8)
    (check,) = failing(replaced(hung))
    assert check.seen == "hung"


@pytest.mark.parametrize("room", ["roomy", "full"])
@pytest.mark.parametrize("action", ["save", "load"])
def test_ours_failing_anywhere_is_told(room: str, action: str) -> None:
    check, *_ = failing(replaced(bad("landfall", room, action)))  # type: ignore[arg-type]
    assert check.claim.startswith(f"landfall {action}s")


def test_one_rank_that_loads_other_bytes_is_enough() -> None:
    (check,) = failing(replaced(changed(good("landfall", "full", "load"), intact=False)))
    assert check.seen == "loaded other bytes than were saved"


def test_a_call_of_one_rank_is_enough() -> None:
    (check,) = failing(replaced(changed(good("landfall", "full", "save"), collectives={"nccl:gather": 1})))
    assert check.claim.startswith("no NCCL call") and check.seen == "1 nccl:gather"


def test_calls_that_could_not_be_counted_do_not_pass_as_none() -> None:
    (check,) = failing(replaced(changed(good("landfall", "full", "save"), collectives=None)))
    assert check.seen == "they could not be counted"


@pytest.mark.parametrize(
    "memory", [Memory(1, 2 * MIB, 0, 0, 0), Memory(0, 0, 2 * MIB, 0, 0), Memory(0, 0, 0, 512, 1), None]
)
def test_memory_taken_on_one_rank_is_enough(memory: Memory | None) -> None:
    (check,) = failing(replaced(changed(good("landfall", "full", "save"), memory=memory)))
    assert check.claim.startswith("no device memory taken")


def test_damage_in_our_files_is_told() -> None:
    (check,) = failing(as_reported(), ("a chunk is damaged",))
    assert check.seen == "a chunk is damaged"


def test_writers_that_did_not_run_are_not_judged() -> None:
    ours = [result for result in as_reported() if result.step.writer == "landfall"]
    assert not any("stock" in check.claim for check in judge(ours, ABOUT, (), on_gpu=True))
    assert judge([good("dcp_gloo", "full", "save")], ABOUT, (), on_gpu=True) == []


EARLY = failure(
    "save",
    "determine_global_metadata",
    "all_gather_object",
    kind="OutOfMemoryError",
    message="CUDA out of memory",
)
OTHER_ERROR = failure(
    "save", "save_state_dict_async_plan", "gather_object", message="Connection closed by peer"
)
ELSEWHERE = failure("save", "finalize_fn", "save_state_dict_async_finalize", "gather_object")


@pytest.mark.parametrize(
    ("why", "version", "on_gpu", "expected"),
    [
        (IN_GATHER, "0.19.2", True, True),
        (IN_GATHER, "0.16.1", True, True),
        (IN_GATHER, "0.16.1", False, True),
        (EARLY, "0.16.1", True, True),
        (EARLY, "0.19.2", True, False),
        (EARLY, "0.16.1", False, False),
        (OTHER_ERROR, "0.16.1", True, False),
        (ELSEWHERE, "0.17.0", True, False),
        (failure("save", "write", message="No space left on device"), "0.16.1", True, False),
    ],
)
def test_the_known_failure_of_each_version_is_told_from_others(
    why: object, version: str, on_gpu: bool, expected: bool
) -> None:
    assert is_as_reported(why, version, on_gpu=on_gpu) is expected  # type: ignore[arg-type]
