"""Is every byte of a checkpoint what was saved?"""

from __future__ import annotations

import os
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from landfall.engine.checkpoint import Checkpoint, Chunk
from landfall.errors import CheckpointError, NoCheckpointError
from landfall.format.cover import find_faults
from landfall.format.index import CHUNK_BYTES, Extent
from landfall.store.base import Store
from landfall.store.local import LocalStore

NUM_THREADS = 4


@dataclass
class Report:
    """What :func:`verify` found. ``faults`` holds one message for each damaged or missing piece."""

    place: str
    step: int = -1
    save_id: str = ""
    num_files: int = 0
    num_bytes: int = 0
    num_tensors: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def lines(self) -> list[str]:
        """The report for people."""
        if not self.ok:
            return [f"DAMAGED {self.place}", *self.faults]
        tensors = ", ".join(f"{count} tensors in {part}" for part, count in self.num_tensors.items())
        held = f"{self.num_files} files, {self.num_bytes:,} bytes, every byte as it was saved"
        return [f"verified {self.place}: step {self.step}, {tensors or 'no tensors'}, {held}"]

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return {"ok": self.ok, **vars(self)}


def verify(path: str | os.PathLike[str] | Store, *, but: Container[str] = ()) -> Report:
    """Read all of one committed checkpoint and compare it with its digests. Works without torch's GPU parts.

    ``but`` are files that are left out. Raises NoCheckpointError when there is no checkpoint at ``path``;
    damage is in the report.
    """
    store = path if isinstance(path, Store) else LocalStore(Path(path))
    report = Report(store.describe())
    try:
        checkpoint = Checkpoint(store)
    except NoCheckpointError:
        raise
    except CheckpointError as error:
        report.faults.append(str(error))
        return report
    report.step, report.save_id = checkpoint.manifest.step, checkpoint.manifest.save_id
    extents = [extent for extent in checkpoint.extents() if extent.file not in but]
    report.num_files = len({extent.file for extent in extents})
    report.num_bytes = sum(extent.length for extent in extents)
    for part in sorted({part for index in checkpoint.indexes for part in index.tensors}):
        records = checkpoint.tensors(part)
        report.num_tensors[part] = len(records)
        report.faults += find_faults(record for group in records.values() for record in group)
    names = _names_by_file(checkpoint)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="landfall-verify") as pool:
        for faults in pool.map(lambda extent: _check_extent(checkpoint, extent, names), extents):
            report.faults += faults
    return report


def _check_extent(
    checkpoint: Checkpoint, extent: Extent, names: dict[str, list[tuple[int, str]]]
) -> list[str]:
    faults = []
    buffer = memoryview(bytearray(min(CHUNK_BYTES, extent.length)))
    for number, expected in enumerate(extent.digests):
        offset = extent.offset + number * CHUNK_BYTES
        chunk = Chunk(extent.file, offset, min(CHUNK_BYTES, extent.offset + extent.length - offset), expected)
        try:
            checkpoint.read_chunk(chunk, buffer[: chunk.length], _tensors_at(names, chunk))
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def _names_by_file(checkpoint: Checkpoint) -> dict[str, list[tuple[int, str]]]:
    names: dict[str, list[tuple[int, str]]] = {}
    for index in checkpoint.indexes:
        for records in index.tensors.values():
            for record in records:
                names.setdefault(record.file, []).append((record.offset, record.key))
    for entries in names.values():
        entries.sort()
    return names


def _tensors_at(names: dict[str, list[tuple[int, str]]], chunk: Chunk) -> str:
    """The tensors with bytes in a chunk, for the message about it."""
    entries = names.get(chunk.file, [])
    inside = [key for offset, key in entries if chunk.offset <= offset < chunk.offset + chunk.length]
    before = [key for offset, key in entries if offset < chunk.offset][-1:]
    found = list(dict.fromkeys(before + inside))
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "") or "(none)"
