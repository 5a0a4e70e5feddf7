"""How a run ends before its last step: a signal or a time limit, agreed by all ranks at the same step."""

from __future__ import annotations

import signal
import time
from types import FrameType

from landfall.coord.base import Coordinator
from landfall.errors import LandfallError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
TIME_IS_UP = 3
"""The exit code after --exit_duration_in_mins; after signal n it is 128 + n."""

_WISH, _ORDER = "control/wish", "control/order"


class StoppedEarlyError(LandfallError):
    """A run ended before its last step as it was asked to, with a checkpoint. ``exit_code`` says why."""

    def __init__(self, what: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(what)


class Control:
    """Tells every rank, after the same step, that the run is to end: no rank may go on alone.

    A rank that gets a signal puts up a note. Rank 0 sees it after its next step and orders the end after
    the step that follows: no rank can have finished that one without rank 0, so all read the order in
    time. What counts as a step is everything in which all ranks take part: training steps and the global
    batches of an evaluation. No collective is involved.
    """

    def __init__(self, coordinator: Coordinator, limit_minutes: float | None = None) -> None:
        self._coordinator = coordinator
        self._until = None if limit_minutes is None else time.monotonic() + 60.0 * limit_minutes
        self._wish: int | None = None
        self._order: tuple[int, int] | None = None
        self._has_told = False
        self._num_ticks = 0
        self.exit_code: int | None = None
        """Set when the run is to end now."""

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 as wishes to end from now on; in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wish = 128 + number

    def tick(self) -> bool:
        """Every rank calls it after each step (see above); whether the run is to end now."""
        self._num_ticks += 1
        if self.exit_code is None:
            if self._coordinator.rank == 0:
                self._lead()
            else:
                self._follow()
            if self._order is not None and self._num_ticks >= self._order[0]:
                self.exit_code = self._order[1]
        return self.exit_code is not None

    def _lead(self) -> None:
        if self._order is not None:
            return
        wish = self._wish
        if wish is None and self._until is not None and time.monotonic() >= self._until:
            wish = TIME_IS_UP
        if wish is None and self._coordinator.world_size > 1:
            note = self._coordinator.notes([_WISH]).get(_WISH)
            wish = int(note) if note else None
        if wish is not None:
            at = self._num_ticks + (1 if self._coordinator.world_size > 1 else 0)
            self._order = at, wish
            self._coordinator.note(_ORDER, f"{at} {wish}".encode())

    def _follow(self) -> None:
        if self._wish is not None and not self._has_told:
            self._coordinator.note(_WISH, str(self._wish).encode())
            self._has_told = True
        if note := self._coordinator.notes([_ORDER]).get(_ORDER):
            at, wish = note.split()
            self._order = int(at), int(wish)


def reason(exit_code: int) -> str:
    """Why a run ends early, in words."""
    if exit_code == TIME_IS_UP:
        return "--exit_duration_in_mins is over"
    return f"{signal.Signals(exit_code - 128).name} was received"
