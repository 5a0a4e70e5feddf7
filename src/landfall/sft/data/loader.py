"""From rows to micro batches, prepared ahead of time by worker processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import pyarrow
import torch
from torch.utils.data import DataLoader, Dataset

from landfall.errors import DataError
from landfall.sft.data.batch import Example, MicroBatch, collate
from landfall.sft.data.sampler import Stream

_PR_SET_PDEATHSIG = 1


class ExampleRows(Protocol):
    """What rows must offer: ``Rows`` does."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Example: ...


def micro_batches(
    rows: ExampleRows,
    stream: Stream,
    first_step: int,
    last_step: int,
    dp_rank: int,
    dp_size: int,
    micro_batch_size: int,
    num_workers: int,
) -> Iterator[list[MicroBatch]]:
    """This rank's micro batches of the steps [first_step, last_step), one list a step.

    They are on the CPU, in pinned memory where there is CUDA. Iterate on the main thread: the workers end
    with the thread that started them. Raises DataError, naming the row, if one can't be read any more.
    """
    plan = (
        micro_batch
        for step in range(first_step, last_step)
        for micro_batch in stream.shard(step, dp_rank, dp_size, micro_batch_size)
    )
    num_micro_batches = stream.global_batch_size // (micro_batch_size * dp_size)
    batches = _load(rows, plan, num_workers)
    for _ in range(first_step, last_step):
        yield list(islice(batches, num_micro_batches))


def eval_batches(
    rows: ExampleRows, dp_rank: int, dp_size: int, micro_batch_size: int, num_workers: int
) -> Iterator[list[MicroBatch]]:
    """This rank's share of ``rows``, every row once, in order; as many lists on every rank.

    A list holds one micro batch (in the last list it may be smaller), or none where the rows have run out.
    Data-parallel ranks need nothing of each other in a forward pass, so a rank with an empty list skips it
    and takes part in the sum of losses and token counts with zeros.
    """
    chunk = micro_batch_size * dp_size
    plan = [
        list(range(start, min(start + chunk, len(rows))))[dp_rank::dp_size]
        for start in range(0, len(rows), chunk)
    ]
    batches = _load(rows, iter([micro_batch for micro_batch in plan if micro_batch]), num_workers)
    for micro_batch in plan:
        yield [next(batches)] if micro_batch else []


def _load(rows: ExampleRows, plan: Iterator[Sequence[int]], num_workers: int) -> Iterator[MicroBatch]:
    loader = DataLoader(
        _MicroBatches(rows),
        sampler=plan,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator(),  # its own, or every iterator would draw from the training's generator
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


class _MicroBatches(Dataset):
    def __init__(self, rows: ExampleRows) -> None:
        self._rows = rows

    def __getitem__(self, indices: Sequence[int]) -> MicroBatch | DataError:
        """An error is returned, as raised in a worker it would arrive wrapped in a traceback's text."""
        try:
            return collate([self._rows[index] for index in indices])
        except DataError as error:
            return error


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """One thread each; and no worker outlives a killed rank, whose sockets and locks it holds open too."""
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    if hasattr(signal, "SIGKILL") and os.path.exists("/proc/self"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
