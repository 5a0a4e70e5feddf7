"""What is compared: four writers, with room on the card and without, saving and loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Writer = Literal["stock", "dcp_nccl", "dcp_gloo", "landfall"]
Room = Literal["roomy", "full"]
Action = Literal["save", "load"]

WRITERS: tuple[Writer, ...] = ("stock", "dcp_nccl", "dcp_gloo", "landfall")
ROOMS: tuple[Room, ...] = ("roomy", "full")
ACTIONS: tuple[Action, ...] = ("save", "load")

_GET_THROUGH: tuple[Writer, ...] = ("dcp_gloo", "landfall")
"""Those that save on a full card: they talk on the CPU."""

NUM_TIMED = 5
"""Saves that are timed, after a first one that is not."""


class Step(msgspec.Struct, frozen=True):
    """One save or load that all ranks do together.

    ``folder`` is where a save goes. ``sources`` are the folders that a load may read, the first complete one
    counts: where a save on the full card failed, what was saved with room is loaded on a full card.
    """

    writer: Writer
    room: Room
    action: Action
    folder: str = ""
    sources: tuple[str, ...] = ()
    repeat: int = 0
    """Counts the saves of one writer when only their time is of interest; 0 elsewhere."""

    @property
    def name(self) -> str:
        return f"{self.writer}/{self.room}/{self.action}" + (f"/{self.repeat}" if self.repeat else "")


class Launch(msgspec.Struct, frozen=True):
    """Fresh ranks, and what they do in order."""

    steps: list[Step]


def plan_launches(writers: Sequence[Writer], root: str, *, on_gpu: bool) -> list[Launch]:
    """All launches, in order; a later one may need what an earlier one saved below ``root``.

    On a GPU every step has fresh ranks: NCCL makes its communicators at their first use and keeps them, so a
    second step would hide what the first one cost. The tripwire keeps nothing; there the ranks are only
    fresh after the writers that fail.
    """
    race = _race(writers, root)
    if on_gpu:
        order = [(writer, room, action) for room in ROOMS for action in ACTIONS for writer in writers]
        launches = [[_step(writer, room, action, root)] for writer, room, action in order] + [race]
    else:
        launches = [
            [
                _step(writer, room, action, root)
                for writer in writers
                if (writer in _GET_THROUGH) == get_through
                for room in ROOMS
                for action in ACTIONS
            ]
            + (race if get_through else [])
            for get_through in (False, True)
        ]
    return [Launch(steps) for steps in launches if steps]


def _step(writer: Writer, room: Room, action: Action, root: str) -> Step:
    if action == "save":
        return Step(writer, room, action, folder=f"{root}/{writer}-{room}")
    rooms = [room, *(other for other in ROOMS if other != room)]
    return Step(writer, room, action, sources=tuple(f"{root}/{writer}-{each}" for each in rooms))


def _race(writers: Sequence[Writer], root: str) -> list[Step]:
    """Those that get through, in turn in the same processes, on the full card."""
    return [
        Step(writer, "full", "save", folder=f"{root}/race-{writer}-{repeat}", repeat=repeat)
        for repeat in range(1, NUM_TIMED + 2)
        for writer in writers
        if writer in _GET_THROUGH
    ]
