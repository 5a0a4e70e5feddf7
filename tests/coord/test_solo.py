"""One rank that talks to itself keeps the same contract."""

from __future__ import annotations

import threading

import pytest

from landfall.coord.solo import SoloCoordinator
from landfall.errors import DeadlineError


def test_own_message_comes_back_until_dropped() -> None:
    coordinator = SoloCoordinator()
    coordinator.post("plan", b"mine")
    assert coordinator.collect("plan", [0], 0) == {0: b"mine"}
    assert coordinator.exchange("names", b"0", 1) == {0: b"0"}
    coordinator.drop("plan")
    coordinator.drop("plan")
    with pytest.raises(DeadlineError) as caught:
        coordinator.collect("plan", [0], 0.05)
    assert caught.value.missing == (0,)


def test_a_message_from_another_thread_ends_the_wait() -> None:
    coordinator = SoloCoordinator()
    poster = threading.Timer(0.05, coordinator.post, ("staged", b"done"))
    poster.start()
    assert coordinator.collect("staged", [0], 30) == {0: b"done"}
    poster.join()


def test_ranks_outside_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="world of 1"):
        SoloCoordinator().collect("key", [1], 0)


def test_no_ranks_need_no_wait() -> None:
    assert SoloCoordinator().collect("key", [], 0) == {}


def test_every_start_has_its_own_run_id() -> None:
    assert SoloCoordinator().run_id != SoloCoordinator().run_id
