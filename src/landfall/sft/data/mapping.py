"""The pass over all rows before training: each row's tokens, images and mistakes, kept on disk.

One mapped row has K tokens with a single pad for each image, n images, and its outcome. Nothing is raised
for a bad row: what is wrong is collected, so that all mistakes are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pyarrow.compute as pc
import xxhash

from landfall.errors import DataError
from landfall.sft.data.images import UNREADABLE, ImageHeader
from landfall.sft.data.processor import Processor
from landfall.sft.data.rows import parse_row
from landfall.sft.data.sources import Source
from landfall.sft.data.template import Encoded, encode
from landfall.sft.data.truncate import keep, lengths

OK, CUT, DELETED, BAD = range(4)
"""Outcomes of a row: whole; shortened; too long and left out; a mistake that must be mended."""

_VERSION = 1  # raise it when the same row would be mapped differently
_ROWS_A_PROCESS = 256  # starting a process for fewer costs more than it gains
_STATS_A_TASK = 1000
_FEATURES = datasets.Features(
    source_row=datasets.Value("int64"),
    source=datasets.Value("string"),
    input_ids=datasets.List(datasets.Value("int32")),
    trained=datasets.List(datasets.Value("bool")),
    images=datasets.List(datasets.Value("string")),
    grid_thw=datasets.List(datasets.Value("int32")),
    image_stats=datasets.List(datasets.Value("int64")),
    length=datasets.Value("int64"),
    outcome=datasets.Value("int8"),
    reason=datasets.Value("string"),
)


def image_path(image: str | bytes, folder: Path | None, image_dir: Path) -> str:
    """The absolute path of an image that a row names, or whose file's content it holds.

    A path is relative to ``folder``, or to the working directory if the image is only there. Content is
    kept as a file in ``image_dir``.
    """
    if isinstance(image, str):
        expanded = Path(image).expanduser()
        beside = (folder or Path()) / expanded
        return os.path.abspath(expanded if not beside.exists() and expanded.exists() else beside)
    path = image_dir / xxhash.xxh3_128_hexdigest(image)
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(image)
        partial.replace(path)
    return str(path)


@dataclass(frozen=True)
class RowMapper:
    """Maps rows of ``source``; runs in the processes of ``datasets``."""

    source: Source
    processor: Processor
    max_length: int | None
    strategy: str
    image_dir: Path
    """where images that came inside a table are put"""

    def __call__(self, example: dict[str, int]) -> dict[str, Any]:
        """``example`` holds ``source_row``, the number of the row in the source."""
        index = example["source_row"]
        mapped = {"source_row": index, "source": self.source.place(index)}
        try:
            return {**mapped, **self._map(self.source.row(index))}
        except DataError as error:
            return {**mapped, **_columns([], [], [], [], 0, BAD, error.what)}

    def _map(self, row: Any) -> dict[str, Any]:
        conversation = parse_row(row)
        paths = [self.image_path(image) for image in conversation.images]
        headers = [self._header(path) for path in paths]
        encoded = encode(conversation, self.processor)
        image_tokens = [self.processor.images.num_tokens(header.grid_thw) for header in headers]
        each = lengths(encoded.input_ids, self.processor.image_token_id, image_tokens)
        length = int(each.sum())
        if self.max_length is None or length <= self.max_length:
            return _columns(encoded.input_ids, encoded.trained, paths, headers, length, OK, "")
        too_long = f"{length} tokens, max_length {self.max_length}"
        if self.strategy in ("delete", "raise"):
            outcome = DELETED if self.strategy == "delete" else BAD
            return _columns([], [], [], [], length, outcome, too_long)
        return self._shorten(encoded, paths, headers, each, too_long)

    def _shorten(
        self,
        encoded: Encoded,
        paths: list[str],
        headers: list[ImageHeader],
        each: np.ndarray,
        too_long: str,
    ) -> dict[str, Any]:
        assert self.max_length is not None
        pads = np.flatnonzero(np.asarray(encoded.input_ids) == self.processor.image_token_id)
        kept = keep(each, pads, self.max_length, self.strategy)
        trained = encoded.trained[kept]
        if not any(trained[1:]):  # nothing precedes the first token that could predict it
            reason = f"{too_long}; nothing to train on is left when the {self.strategy} is cut off"
            return _columns([], [], [], [], int(each.sum()), DELETED, reason)
        images = slice(*np.searchsorted(pads, [kept.start, kept.stop]).tolist())
        num_lost = len(paths) - len(paths[images])
        reason = too_long + (f"; {num_lost} of {len(paths)} images cut off" if num_lost else "")
        length = int(each[kept].sum())
        return _columns(encoded.input_ids[kept], trained, paths[images], headers[images], length, CUT, reason)

    def image_path(self, image: str | bytes) -> str:
        return image_path(image, self.source.folder, self.image_dir)

    def _header(self, path: str) -> ImageHeader:
        try:
            return self.processor.images.header(path)
        except FileNotFoundError:
            raise DataError(f"there is no image {path}") from None
        except UNREADABLE as error:
            raise DataError(f"unreadable image {path}: {type(error).__name__}: {error}") from None


def _columns(
    input_ids: list[int],
    trained: list[bool],
    paths: list[str],
    headers: list[ImageHeader],
    length: int,
    outcome: int,
    reason: str,
) -> dict[str, Any]:
    return {
        "input_ids": input_ids,
        "trained": trained,
        "images": paths,
        "grid_thw": [side for header in headers for side in header.grid_thw],
        "image_stats": [stat for header in headers for stat in (header.num_bytes, header.mtime_ns)],
        "length": length,
        "outcome": outcome,
        "reason": reason,
    }


def map_rows(
    mapper: RowMapper, picks: np.ndarray, cache_dir: Path, num_proc: int, use_cache: bool, trust_cache: bool
) -> datasets.Dataset:
    """The mapped rows with numbers ``picks`` of the mapper's source.

    They lie in ``cache_dir``, under a key of all that they depend on. With ``use_cache`` what lies there
    is taken instead, unless an image has changed since, or there were mistakes that may be mended by now;
    ``trust_cache`` omits that look at every image.
    """
    key = _key(mapper, picks)
    rows = datasets.Dataset.from_dict({"source_row": picks})
    num_proc = min(num_proc, -(-len(picks) // _ROWS_A_PROCESS))

    def run(use_cache: bool) -> datasets.Dataset:
        return rows.map(
            mapper,
            features=_FEATURES,
            num_proc=num_proc if num_proc > 1 else None,
            cache_file_name=str(cache_dir / f"{key}.arrow"),
            new_fingerprint=key,
            load_from_cache_file=use_cache,
            desc=f"Reading {Path(mapper.source.name).name}",
        )

    was_there = use_cache and next(cache_dir.glob(f"{key}*.arrow"), None) is not None
    mapped = run(use_cache)
    if was_there and not trust_cache and _is_stale(mapped):
        mapped = run(use_cache=False)
    return mapped


def _key(mapper: RowMapper, picks: np.ndarray) -> str:
    parts = [
        _VERSION,
        mapper.source.fingerprint,
        mapper.processor.fingerprint,
        mapper.max_length,
        mapper.strategy,
        os.getcwd(),  # images may be relative to it
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(picks).tobytes()),
    ]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def _is_stale(mapped: datasets.Dataset) -> bool:
    if pc.any(pc.equal(mapped.data.column("outcome"), BAD)).as_py():
        return True
    paths = mapped.data.column("images").combine_chunks().flatten().to_pylist()
    stats = mapped.data.column("image_stats").combine_chunks().flatten().to_numpy().reshape(-1, 2)
    known = {path: (int(size), int(mtime)) for path, (size, mtime) in zip(paths, stats, strict=True)}
    with ThreadPoolExecutor(16) as pool:  # on network file systems the time goes into waiting
        return not all(pool.map(_are_unchanged, _chunks(list(known.items()))))


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + _STATS_A_TASK] for start in range(0, len(items), _STATS_A_TASK))


def _are_unchanged(files: Sequence[tuple[str, tuple[int, int]]]) -> bool:
    for path, known in files:
        try:
            stat = os.stat(path)
        except OSError:
            return False
        if (stat.st_size, stat.st_mtime_ns) != known:
            return False
    return True
