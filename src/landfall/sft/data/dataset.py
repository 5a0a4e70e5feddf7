"""``prepare``: from the names of datasets to rows that can be trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash

from landfall.errors import DataError, UsageError
from landfall.sft.data.batch import NO_LOSS, Example
from landfall.sft.data.mapping import BAD, CUT, DELETED, OK, RowMapper, locate_image, map_rows
from landfall.sft.data.positions import mrope_positions
from landfall.sft.data.processor import Processor
from landfall.sft.data.report import Fate, Report, refuse
from landfall.sft.data.sources import Source, open_source
from landfall.sft.data.spec import DatasetSpec, parse_spec
from landfall.sft.data.truncate import check_strategy


@dataclass(frozen=True)
class DataConfig:
    dataset: tuple[str, ...]
    """each ``path[#N]`` or ``[hf::]id[:subset][#N]``"""
    cache_dir: str
    """where mapped rows are kept; the ranks of one host share it"""
    val_dataset: tuple[str, ...] = ()
    split_dataset_ratio: float = 0.0
    """share of each dataset that is set aside for validation; 0 if ``val_dataset`` is given"""
    max_length: int | None = None
    """tokens of a row, image tokens included; None: no limit"""
    truncation_strategy: str = "delete"
    """what becomes of longer rows: delete, raise, left, right"""
    load_from_cache_file: bool = False
    dataset_num_proc: int = 1
    seed: int = 42


class Rows:
    """Rows to train on or validate with. Picklable."""

    def __init__(self, mapped: datasets.Dataset, picks: np.ndarray, processor: Processor) -> None:
        """``picks`` are the places of the rows in ``mapped``, in order."""
        self._mapped, self._picks = mapped.with_format("numpy"), picks
        self._images, self._image_token_id = processor.images, processor.image_token_id
        self.lengths: np.ndarray = np.asarray(mapped.with_format("numpy")["length"][:])[picks]
        """[number of rows] tokens of each row, image tokens included"""

    def __len__(self) -> int:
        return len(self._picks)

    def __getitem__(self, index: int) -> Example:
        """Opens the row's images. Raises DataError naming the row if one can't be read any more."""
        row = self._mapped[int(self._picks[index])]
        grid_thw = np.asarray(row["grid_thw"], dtype=np.int64).reshape(-1, 3)
        compact = np.asarray(row["input_ids"], dtype=np.int64)
        each = np.ones(compact.size, dtype=np.int64)
        each[compact == self._image_token_id] = [self._images.num_tokens(grid) for grid in grid_thw.tolist()]
        input_ids, trained = np.repeat(compact, each), np.repeat(np.asarray(row["trained"], dtype=bool), each)
        positions = mrope_positions(input_ids, grid_thw, self._image_token_id, self._images.merge_size)
        paths, source = [str(path) for path in row["images"]], str(row["source"])
        return Example(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(np.where(trained, input_ids, NO_LOSS)),
            position_ids=torch.from_numpy(positions),
            pixel_values=self._images.pixels(paths, grid_thw, source) if paths else None,
            grid_thw=torch.from_numpy(grid_thw) if paths else None,
            source=source,
        )

    def source(self, index: int) -> str:
        """``file:line`` of a row, without opening its images."""
        return str(self._mapped[int(self._picks[index])]["source"])


@dataclass(frozen=True)
class Prepared:
    train: Rows
    val: Rows | None
    report: Report
    digest: str
    """Equal on two ranks if, and only if, they have the same rows in the same order."""
    _split_off: tuple[tuple[Source, np.ndarray], ...] = field(repr=False, default=())

    def split_off_rows(self) -> Iterator[dict[str, Any]]:
        """The rows that were set aside for validation, as they were written, with absolute image paths."""
        for source, picks in self._split_off:
            for pick in picks.tolist():
                yield _with_absolute_images(source.row(pick), source.folder)

    def write_split_off(self, path: str | Path) -> None:
        """Write ``split_off_rows`` as a jsonl file that serves as ``--val_dataset``."""
        with open(path, "w", encoding="utf-8") as file:
            for row in self.split_off_rows():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class _Part:
    """One dataset, mapped, and the places in ``mapped`` of its rows."""

    source: Source
    mapped: datasets.Dataset
    key: str
    train: np.ndarray
    val: np.ndarray


def prepare(config: DataConfig, processor: Processor, leader: bool = True) -> Prepared:
    """Read every row, refuse bad ones all together, and split off validation rows.

    Raises UsageError for arguments that can't be, DataError for rows that can't be used or if none is left.
    The result depends on the arguments and the files alone. Among the ranks that share ``cache_dir`` one,
    the leader, calls this first; when it has returned, the others call it with ``leader=False`` and read
    what it wrote, without looking at every image again.
    """
    _check(config)
    is_split = config.split_dataset_ratio > 0 and not config.val_dataset
    ratio = config.split_dataset_ratio if is_split else 0.0
    parts = [_part(parse_spec(text), n, ratio, config, processor, leader) for n, text in enumerate(config.dataset)]
    val_parts = [_part(parse_spec(text), n, 0.0, config, processor, leader) for n, text in enumerate(config.val_dataset)]
    mapped = [part.mapped for part in parts + val_parts]
    refuse([fate for rows in mapped for fate in _fates(rows, BAD)], sum(map(len, mapped)))

    train = _rows(parts, [part.train for part in parts], processor)
    if is_split:
        val = _rows(parts, [part.val for part in parts], processor)
    else:
        val = _rows(val_parts, [part.train for part in val_parts], processor) if val_parts else None
    for rows, flag in ((train, "--dataset"), (val, "--val_dataset")):
        if rows is not None and len(rows) == 0:
            raise DataError(
                f"No row of {flag} is left",
                got=f"{len([f for m in mapped for f in _fates(m, DELETED)])} rows longer than max_length {config.max_length}",
                do="raise max_length, lower IMAGE_MAX_TOKEN_NUM, or look at the data",
            )
    split_off = tuple((part.source, _source_rows(part, part.val)) for part in parts) if is_split else ()
    return Prepared(train, val, _report(mapped, train, val), _digest(parts + val_parts), split_off)
