"""Start-up steps that succeed on all ranks or fail on all, with the same error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from landfall.coord.base import Coordinator
from landfall.errors import LandfallError, UsageError


class _Trouble(msgspec.Struct):
    exit_code: int
    text: str


class Together:
    """Runs named steps; at the end of each, ranks exchange what went wrong.

    For start-up: it costs one message a rank and step. A rank that is missing at the end of a step is named
    after ``deadline_s``.
    """

    def __init__(self, coordinator: Coordinator, deadline_s: float) -> None:
        self._coordinator, self._deadline_s = coordinator, deadline_s
        self._num_steps = 0

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Leave the block with an error on every rank if any rank had one, whatever it was."""
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:
            trouble = error
        self._num_steps += 1
        mine = msgspec.msgpack.encode(None if trouble is None else _as_message(trouble))
        answers = self._coordinator.exchange(f"together/{self._num_steps}/{name}", mine, self._deadline_s)
        if trouble is not None:
            raise trouble
        for rank, answer in sorted(answers.items()):
            other = msgspec.msgpack.decode(answer, type=_Trouble | None)
            if other is not None:
                kind = UsageError if other.exit_code == UsageError.exit_code else LandfallError
                raise kind(f"(rank {rank}) {other.text}")

    def same(self, what: str, value: str) -> None:
        """Every rank passes a value that should be the same; LandfallError on all if it is not."""
        self._num_steps += 1
        key = f"together/{self._num_steps}/same"
        values = self._coordinator.exchange(key, value.encode(), self._deadline_s)
        others = sorted(rank for rank, other in values.items() if other != values[0])
        if others:
            raise UsageError(
                f"Ranks disagree about {what}",
                where=f"ranks {others[:8]}{' ...' if len(others) > 8 else ''}",
                got="not what rank 0 has",
                do="check that all nodes see the same files",
            )


def _as_message(error: Exception) -> _Trouble:
    if isinstance(error, LandfallError):
        return _Trouble(error.exit_code, str(error))
    return _Trouble(LandfallError.exit_code, f"{type(error).__name__}: {error}")
