"""The weights of a Hugging Face folder: model.safetensors, or numbered files and an index that names them.

Written as huggingface_hub splits and transformers names them; read without trusting a word of the index.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from landfall.errors import DamagedError, HostileFileError, NoCheckpointError, UsageError
from landfall.format.safetensors import (
    MAX_HEADER_BYTES,
    TensorEntry,
    lay_out,
    parse_json_object,
    read_header,
    tensor_bytes,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


@dataclass(frozen=True)
class PlannedFile:
    """A weights file before its data is there: write ``header`` at 0 and each tensor at its entry's start."""

    name: str
    header: bytes
    entries: dict[str, TensorEntry]
    """In file order."""

    @property
    def num_bytes(self) -> int:
        """The size of the complete file."""
        return next((entry.end for entry in reversed(self.entries.values())), len(self.header))


@dataclass(frozen=True)
class ExportPlan:
    """All weights files of a folder, and the bytes of its INDEX_FILE if there are several."""

    files: tuple[PlannedFile, ...]
    index: bytes | None


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a folder: bytes [start, end) of ``file``, which lies in the folder."""

    file: str
    dtype: str
    """safetensors' name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    end: int


def parse_size(size: int | str) -> int:
    """Bytes of a size such as "5GB" or "500MB" (powers of ten, as in huggingface_hub), or of plain bytes."""
    if isinstance(size, int):
        num_bytes: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", size, re.IGNORECASE | re.ASCII)
        num_bytes = float(match[1]) * _UNITS[match[2].upper()] if match else math.nan
    if not 1 <= num_bytes < 2**63:
        expected = "a number and KB, MB, GB or TB (powers of ten), such as 5GB"
        raise UsageError("max_shard_size is not a size", got=repr(size), expected=expected)
    return int(num_bytes)


def plan_export(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], max_shard_size: int | str = "5GB"
) -> ExportPlan:
    """Which file holds what of ``tensors`` (name -> safetensors dtype, shape), to the byte.

    A function of its arguments, the order of ``tensors`` among them, so every rank computes the same plan.
    A tensor larger than ``max_shard_size`` (of data, without headers) gets a file of its own.
    """
    if not tensors:
        raise UsageError("there are no tensors to export")
    shards = _split(
        {name: tensor_bytes(*tensor) for name, tensor in tensors.items()}, parse_size(max_shard_size)
    )
    files = []
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(PlannedFile(file, *lay_out({name: tensors[name] for name in names})))
    return ExportPlan(tuple(files), _index(files) if len(files) > 1 else None)


def _split(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names by file, filled in the given order, as huggingface_hub does: large tensors don't close a file."""
    shards: list[list[str]] = []
    open_shard: list[str] = []
    open_bytes = 0
    for name, size in sizes.items():
        if size > max_bytes:
            shards.append([name])
            continue
        if open_bytes + size > max_bytes:
            shards.append(open_shard)
            open_shard, open_bytes = [], 0
        open_shard.append(name)
        open_bytes += size
    return [*shards, open_shard] if open_shard else shards


def _index(files: list[PlannedFile]) -> bytes:
    entries = [(file.name, name, entry) for file in files for name, entry in file.entries.items()]
    total_size = sum(entry.end - entry.start for _, _, entry in entries)
    weight_map = {name: file for file, name, _ in entries}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def folder_entries(folder: str | Path) -> dict[str, FileTensor]:
    """Every tensor of a Hugging Face folder by name, from the headers of its files.

    Refuses folders without weights (NoCheckpointError), index and files that contradict each other
    (DamagedError) and file names that leave the folder (HostileFileError). Links are followed, as the hub's
    cache needs.
    """
    folder = Path(folder)
    has_single, has_index = (folder / SINGLE_FILE).exists(), (folder / INDEX_FILE).exists()
    if has_single and has_index:
        do = f"remove {INDEX_FILE} and its files, or {SINGLE_FILE}, whichever is left over"
        raise DamagedError("a folder holds two sets of weights", where=str(folder), do=do)
    if has_single:
        return _file_tensors(folder, SINGLE_FILE)
    if not has_index:
        expected = f"{SINGLE_FILE} or {INDEX_FILE}"
        raise NoCheckpointError("no safetensors weights here", where=str(folder), expected=expected)
    weight_map = _read_weight_map(folder / INDEX_FILE)
    found: dict[str, FileTensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors = _file_tensors(folder, file)
        listed = {name for name, its_file in weight_map.items() if its_file == file}
        if tensors.keys() != listed:
            name = min(tensors.keys() ^ listed)
            got = f"{name} is in {'the file' if name in tensors else 'the index'} only"
            raise DamagedError(
                "index and file name different tensors",
                where=str(folder / file),
                got=got,
                do="copy both again",
            )
        found |= tensors
    return {name: found[name] for name in weight_map}


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name of an index, after checking that every file name stays in the folder."""
    size = _regular_size(path)
    if size > MAX_HEADER_BYTES:
        raise HostileFileError("an index is absurdly long", where=str(path), got=f"{size} bytes")
    weight_map = parse_json_object(path.read_bytes().strip(), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError("an index has no weight_map", where=str(path), expected="tensor name -> file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\x00\ud800-\udfff]+\.safetensors", file):
            raise HostileFileError(
                "an index may only name safetensors files of its own folder",
                where=f"{path}, tensor {name}",
                got=repr(file)[:200],
            )
    return weight_map


def _file_tensors(folder: Path, file: str) -> dict[str, FileTensor]:
    path = folder / file
    size = _regular_size(path)
    with open(path, "rb") as opened:
        entries = read_header(lambda offset, n: os.pread(opened.fileno(), n, offset), size, str(path))
    return {
        name: FileTensor(file, entry.dtype, entry.shape, entry.start, entry.end)
        for name, entry in entries.items()
    }


def _regular_size(path: Path) -> int:
    """The file's size; DamagedError when it is missing or not a file that can be read to its end."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError("a file is missing", where=str(path), do="copy the whole folder again") from error
    if not stat.S_ISREG(status.st_mode):
        raise HostileFileError("not a regular file", where=str(path))
    return status.st_size
