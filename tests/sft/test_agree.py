"""A start-up step ends the same way on every rank, whatever went wrong on one."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.errors import LandfallError, UsageError
from landfall.sft.agree import Together
from landfall.testing.procs import run_ranks

ERRORS: dict[str, Exception] = {
    "usage": UsageError("the wrong file", where="here"),
    "damage": LandfallError("a broken file"),
    "surprise": ZeroDivisionError("division by zero"),
}


def one_rank_fails(kind: str) -> tuple[str, int | None, str]:
    """Rank 1 fails in the second of three steps. What this rank got, and the steps that it began."""
    dist.init_process_group("gloo")
    coordinator = TCPStoreCoordinator.from_process_group(deadline_s=60)
    together, begun = Together(coordinator, 60), 0
    try:
        for number in range(3):
            with together.step(f"step {number}"):
                begun += 1
                if number == 1 and os.environ["RANK"] == "1":
                    raise ERRORS[kind]
    except Exception as error:
        assert begun == 2
        return type(error).__name__, getattr(error, "exit_code", None), str(error)
    finally:
        coordinator.close()
    raise AssertionError("no error arrived")


def ranks_that_disagree() -> str:
    dist.init_process_group("gloo")
    coordinator = TCPStoreCoordinator.from_process_group(deadline_s=60)
    together = Together(coordinator, 60)
    together.same("the rows", "as everybody has them")
    with pytest.raises(UsageError) as caught:
        together.same("the rows", "others" if os.environ["RANK"] == "2" else "as everybody has them")
    coordinator.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("usage", ("UsageError", 2, "(rank 1) the wrong file\n  where: here")),
        ("damage", ("LandfallError", 1, "(rank 1) a broken file")),
        ("surprise", ("LandfallError", 1, "(rank 1) ZeroDivisionError: division by zero")),
    ],
)
def test_error_of_one_rank_is_raised_on_all(kind: str, others: tuple[str, int, str]) -> None:
    first, own, last = run_ranks(one_rank_fails, 3, kind, timeout_s=60)
    assert first == last == others
    assert own == (type(ERRORS[kind]).__name__, getattr(ERRORS[kind], "exit_code", None), str(ERRORS[kind]))


def test_ranks_that_differ_are_named_on_all() -> None:
    told = run_ranks(ranks_that_disagree, 3, timeout_s=60)
    assert told[0] == told[1] == told[2]
    assert "Ranks disagree about the rows" in told[0] and "ranks [2]" in told[0]
