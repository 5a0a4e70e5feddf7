"""Which rows a step trains on, and how many steps there are."""

from __future__ import annotations

import numpy as np

from landfall.errors import UsageError


def epoch_rows(num_rows: int, micro_batch_size: int, dp_size: int) -> int:
    """Rows that one epoch trains on: as many as fill whole micro batches on every data-parallel rank."""
    unit = micro_batch_size * dp_size
    rows = num_rows // unit * unit
    if rows == 0:
        raise UsageError(
            "There are fewer training rows than one micro batch on every rank takes",
            got=f"{num_rows} rows",
            expected=f"at least {unit}: micro_batch_size {micro_batch_size} x {dp_size} data-parallel ranks",
            do="use fewer ranks, a smaller micro_batch_size, or more data",
        )
    return rows


def train_iters(epoch_rows: int, global_batch_size: int, epochs: int) -> int:
    """Steps of ``epochs`` epochs. What is left after the last whole global batch is not trained on."""
    total = epoch_rows * epochs
    if total < global_batch_size:
        raise UsageError(
            "There are too few training rows for a single step",
            got=f"{total} rows in {epochs} epochs",
            expected=f"at least global_batch_size {global_batch_size}",
            do="use a smaller global_batch_size, more epochs, or more data",
        )
    return total // global_batch_size


def check_batch_sizes(micro_batch_size: int, dp_size: int, global_batch_size: int) -> None:
    """Raises UsageError unless every rank gets the same number of whole micro batches a step."""
    if min(micro_batch_size, global_batch_size) < 1 or global_batch_size % (micro_batch_size * dp_size):
        raise UsageError(
            "global_batch_size must be a multiple of micro_batch_size x data-parallel ranks",
            got=f"{global_batch_size}, with micro_batch_size {micro_batch_size} and {dp_size} ranks",
        )


class Stream:
    """An endless sequence of rows, one permutation an epoch, cut into global batches.

    A pure function of its arguments and the step, so a resumed run goes on with the very rows that come
    next, also at the end of an epoch and with another number of data-parallel ranks, as long as
    ``epoch_rows`` stays what it was when the run began.
    """

    def __init__(self, num_rows: int, epoch_rows: int, global_batch_size: int, seed: int) -> None:
        if not 1 <= epoch_rows <= num_rows or global_batch_size < 1:
            raise UsageError(
                "An epoch has at least 1 row and no more than there are; a global batch at least 1",
                got=f"{epoch_rows} of {num_rows} rows an epoch, global_batch_size {global_batch_size}",
            )
        self.num_rows, self.epoch_rows = num_rows, epoch_rows
        self.global_batch_size, self.seed = global_batch_size, seed
        self._epoch, self._order = -1, np.arange(0)

    def rows(self, step: int) -> list[int]:
        """The rows of the global batch of ``step`` (from 0), in order."""
        positions = range(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        return [int(self._permutation(p // self.epoch_rows)[p % self.epoch_rows]) for p in positions]

    def shard(self, step: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
        """The micro batches of one data-parallel rank in ``step``."""
        check_batch_sizes(micro_batch_size, dp_size, self.global_batch_size)
        rows = self.rows(step)[dp_rank::dp_size]
        return [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            # RandomState, unlike newer generators, promises the same numbers in every version of numpy
            random = np.random.RandomState((self.seed + epoch) % 2**32)
            self._epoch, self._order = epoch, random.permutation(self.num_rows)
        return self._order
