"""What became of the rows: for the log, and the error when some are unusable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from landfall.errors import DataError

_NUM_SHOWN = 5


@dataclass(frozen=True)
class Fate:
    """A row that is not trained on as it was written."""

    source: str
    """``file:line``"""
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True)
class Report:
    num_rows: int
    """rows that were read, of training and validation data"""
    num_train: int
    num_val: int
    deleted: tuple[Fate, ...]
    """overlong rows that were left out; none was replaced by another"""
    cut: tuple[Fate, ...]
    """overlong rows that were shortened"""
    num_train_tokens: int
    """of one pass over the training rows"""
    longest_row: int
    """tokens of the longest training row"""

    def lines(self) -> list[str]:
        """For people: the counts, and the first rows that were left out or shortened."""
        mean = self.num_train_tokens / max(self.num_train, 1)
        return [
            f"{self.num_rows} rows read: {self.num_train} to train on, {self.num_val} to validate with",
            f"training rows: {self.num_train_tokens} tokens, {mean:.0f} a row, at most {self.longest_row}",
            *_listed("overlong rows left out", self.deleted),
            *_listed("overlong rows shortened", self.cut),
        ]


def _listed(title: str, fates: Sequence[Fate]) -> list[str]:
    if not fates:
        return []
    more = [f"  and {len(fates) - _NUM_SHOWN} more"] if len(fates) > _NUM_SHOWN else []
    return [f"{len(fates)} {title}:", *(f"  {fate}" for fate in fates[:_NUM_SHOWN]), *more]


def refuse(bad: Sequence[Fate], num_rows: int) -> None:
    """Raises DataError naming the first of ``bad`` and their number, if there are any."""
    if not bad:
        return
    more = f"\n    and {len(bad) - _NUM_SHOWN} more" if len(bad) > _NUM_SHOWN else ""
    raise DataError(
        f"{len(bad)} of {num_rows} rows can't be used",
        where="".join(f"\n    {fate}" for fate in bad[:_NUM_SHOWN]) + more,
        do="mend or remove them; nothing was trained yet",
    )
