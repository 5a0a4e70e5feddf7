"""Load boxes of tensors from any layout: only what is touched is read, all of it verified, no collective."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import torch

from landfall.engine.checkpoint import Chunk, Source
from landfall.engine.stage import host_bytes
from landfall.errors import CheckpointError, DamagedError
from landfall.format.cover import find_faults
from landfall.format.index import TensorRecord
from landfall.format.shards import Box, Shard
from landfall.format.torch_dist import dtype_of

BATCH_BYTES = 256 << 20
"""Host memory for shards that can't be read in place (on a device, or of another dtype)."""
NUM_THREADS = 4


@dataclass(frozen=True)
class LoadReport:
    num_tensors: int
    num_bytes: int
    num_bytes_read: int


@dataclass(frozen=True)
class _Run:
    """``num_bytes`` at ``offset`` of a file go to ``into[start:]``."""

    file: str
    offset: int
    into: memoryview
    start: int
    num_bytes: int
    key: str


def load(shards: Sequence[Shard], source: Source, part: str) -> LoadReport:
    """Fill every shard's ``data`` in place from the records that ``source`` has in the format ``part``.

    Each rank calls it for what it wants, and for no other rank's sake. Bytes are copied, cast on the host
    where the dtype differs, and put on the device by contiguous copies, which allocate nothing there. Raises
    CheckpointError before anything is changed when a tensor is missing or has another shape, DamagedError
    when bytes do not match their digest (shards filled before it are then new, the others old).
    """
    records = source.tensors(part, {shard.key for shard in shards})
    _check_wanted(shards, records, source.place)
    num_read = 0
    for batch in _batches(sorted(shards, key=lambda shard: _first_place(shard, records))):
        num_read += _load_batch(batch, records, source)
    num_bytes = sum(shard.num_bytes for shard in shards)
    return LoadReport(len({shard.key for shard in shards}), num_bytes, num_read)


def _check_wanted(shards: Sequence[Shard], records: dict[str, list[TensorRecord]], place: str) -> None:
    missing = sorted({shard.key for shard in shards if shard.key not in records})
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} of {len({shard.key for shard in shards})} tensors",
            where=place,
            got=f"no {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}",
            do="check that the checkpoint is of this model and was saved with what is asked of it",
        )
    checked: set[str] = set()
    for shard in shards:
        found = records[shard.key]
        if found[0].global_shape != shard.global_shape:
            raise CheckpointError(
                "The checkpoint is of another model",
                where=f"{place}, tensor {shard.key}",
                got=f"shape {list(found[0].global_shape)}",
                expected=f"shape {list(shard.global_shape)}",
            )
        try:
            dtype_of(found[0].dtype)
        except ValueError as error:
            where = f"{place}, tensor {shard.key}"
            raise DamagedError("A tensor has a dtype that is none", where=where, got=str(error)) from error
        if len(found) > 1 and shard.key not in checked and (faults := find_faults(found)):
            raise DamagedError("A tensor in the checkpoint is not whole", where=place, got=faults[0])
        checked.add(shard.key)
        shared = (record.box.intersect(shard.box) for record in found)
        held = sum(box.num_elements for box in shared if box is not None)
        if held != shard.box.num_elements:
            raise CheckpointError(
                "A tensor in the checkpoint is not whole",
                where=f"{place}, tensor {shard.key}",
                got=f"{held} elements of the box {shard.box}",
                expected=f"{shard.box.num_elements}",
            )


def _first_place(shard: Shard, records: dict[str, list[TensorRecord]]) -> tuple[str, int]:
    return min((record.file, record.offset) for record in records[shard.key])


def _batches(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Shards whose host copies fit into BATCH_BYTES together; those read in place cost nothing."""
    batch: list[Shard] = []
    num_bytes = 0
    for shard in shards:
        cost = shard.num_bytes if shard.data.is_cuda else 0
        if batch and num_bytes + cost > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(shard)
        num_bytes += cost
    if batch:
        yield batch


def _load_batch(batch: list[Shard], records: dict[str, list[TensorRecord]], source: Source) -> int:
    targets: list[tuple[Shard, torch.Tensor]] = []
    runs: list[_Run] = []
    for shard in batch:
        host = _host_target(shard, dtype_of(records[shard.key][0].dtype))
        targets.append((shard, host))
        view = host_bytes(host)
        for record in records[shard.key]:
            runs.extend(_runs(record, shard, view, host.element_size()))
    num_read = _read_runs(runs, source)
    for shard, host in targets:
        if host.data_ptr() != shard.data.data_ptr():
            _put(host, shard.data)
    return num_read


def _host_target(shard: Shard, stored: torch.dtype) -> torch.Tensor:
    """Where the stored bytes are gathered: the shard itself when it can take them as they are."""
    data = shard.data.detach()
    if data.device.type == "cpu" and data.dtype == stored and data.is_contiguous():
        return data
    return torch.empty(shard.box.sizes, dtype=stored)


def _put(host: torch.Tensor, data: torch.Tensor) -> None:
    """Cast on the host, then copy contiguous runs: torch allocates device memory for anything else."""
    host = host.to(data.dtype)
    _copy_runs(host, data.detach())


def _copy_runs(host: torch.Tensor, data: torch.Tensor) -> None:
    if data.is_contiguous():
        data.copy_(host)
        return
    for source, target in zip(host, data, strict=True):
        _copy_runs(source, target)


def _runs(record: TensorRecord, shard: Shard, into: memoryview, item_bytes: int) -> Iterator[_Run]:
    """The contiguous stretches that a record and a shard share, in both of their row-major layouts."""
    shared = record.box.intersect(shard.box)
    if shared is None:
        return
    inner = _num_joined_dims(shared, record.box, shard.box)
    outer = len(shared.sizes) - inner
    num_bytes = math.prod(shared.sizes[outer:]) * item_bytes
    from_starts = _run_starts(shared, record.box, outer) * item_bytes + record.offset
    to_starts = _run_starts(shared, shard.box, outer) * item_bytes
    for offset, start in zip(from_starts.tolist(), to_starts.tolist(), strict=True):
        yield _Run(record.file, offset, into, start, num_bytes, shard.key)


def _num_joined_dims(shared: Box, *boxes: Box) -> int:
    """How many trailing dimensions of ``shared`` are one contiguous stretch in all of ``boxes``."""
    joined = 0
    for dim in reversed(range(len(shared.sizes))):
        joined += 1
        if any(shared.sizes[dim] != box.sizes[dim] for box in boxes):
            break
    return joined


def _run_starts(shared: Box, box: Box, outer: int) -> numpy.ndarray:
    """The element positions in ``box`` at which the stretches of ``shared`` begin, in row-major order."""
    strides = [math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
    first = sum((s - b) * stride for s, b, stride in zip(shared.offsets, box.offsets, strides, strict=True))
    starts = numpy.array([first], dtype=numpy.int64)
    for dim in range(outer):
        steps = numpy.arange(shared.sizes[dim], dtype=numpy.int64) * strides[dim]
        starts = (starts[:, None] + steps).reshape(-1)
    return starts


def _read_runs(runs: list[_Run], source: Source) -> int:
    """Read each touched chunk once, verify it, and copy what is wanted of it."""
    wanted: dict[Chunk, list[_Run]] = defaultdict(list)
    for run in runs:
        offset, end = run.offset, run.offset + run.num_bytes
        while offset < end:
            chunk = source.chunk_of(run.file, offset)
            wanted[chunk].append(run)
            offset = chunk.offset + chunk.length
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="landfall-load") as pool:
        list(pool.map(lambda item: _read_chunk(item[0], item[1], source), sorted_by_place(wanted)))
    return sum(chunk.length for chunk in wanted)


def sorted_by_place(wanted: dict[Chunk, list[_Run]]) -> list[tuple[Chunk, list[_Run]]]:
    return sorted(wanted.items(), key=lambda item: (item[0].file, item[0].offset))


def _read_chunk(chunk: Chunk, runs: list[_Run], source: Source) -> None:
    first = runs[0]
    if first.offset <= chunk.offset and chunk.offset + chunk.length <= first.offset + first.num_bytes:
        start = first.start + chunk.offset - first.offset  # all of the chunk is one stretch: read it in place
        source.read_chunk(chunk, first.into[start : start + chunk.length], first.key)
        return
    data = memoryview(bytearray(chunk.length))
    source.read_chunk(chunk, data, first.key)
    for run in runs:
        begin = max(run.offset, chunk.offset)
        end = min(run.offset + run.num_bytes, chunk.offset + chunk.length)
        start = run.start + begin - run.offset
        run.into[start : start + end - begin] = data[begin - chunk.offset : end - chunk.offset]
