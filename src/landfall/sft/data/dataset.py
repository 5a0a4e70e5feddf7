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

from landfall.errors import DataError
from landfall.sft.data.batch import NO_LOSS, Example
from landfall.sft.data.config import DataConfig
from landfall.sft.data.mapping import BAD, CUT, DELETED
from landfall.sft.data.parts import Part, column, read_parts
from landfall.sft.data.positions import mrope_positions
from landfall.sft.data.processor import Processor
from landfall.sft.data.report import Fate, Report, refuse

__all__ = ["DataConfig", "Prepared", "Rows", "prepare"]


class Rows:
    """Rows to train on or to validate with. Picklable."""

    def __init__(self, mapped: datasets.Dataset, picks: np.ndarray, processor: Processor) -> None:
        """``picks`` are the places of the rows in ``mapped``, in order."""
        self._mapped, self._picks = mapped.with_format("numpy"), picks
        self._images, self._image_token_id = processor.images, processor.image_token_id
        self.lengths: np.ndarray = column(mapped, "length")[picks]
        """[len(self)] tokens of each row, image tokens included"""

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
    """Differs between two ranks if they have other rows, or other tokens in them."""
    _parts: tuple[Part, ...] = field(repr=False)

    def split_off_rows(self) -> Iterator[dict[str, Any]]:
        """The rows that were split from ``dataset``, as they were written, with absolute image paths."""
        for part in self._parts:
            yield from part.split_off_rows()

    def write_split_off(self, path: str | Path) -> None:
        """Write ``split_off_rows`` as a jsonl file that can serve as ``--val_dataset``."""
        with open(path, "w", encoding="utf-8") as file:
            for row in self.split_off_rows():
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def prepare(config: DataConfig, processor: Processor, leader: bool = True) -> Prepared:
    """Read every row, refuse the bad ones all together, and split off validation rows.

    Raises UsageError for datasets that can't be opened, DataError for rows that can't be used and if none
    is left. The result depends on the arguments and the files alone. Of the ranks that share ``cache_dir``
    one, the leader, calls this first; when it has returned the others call it with ``leader=False`` and take
    what it wrote without looking at every image again.
    """
    ratio = config.split_ratio
    parts = read_parts(config.dataset, ratio, config, processor, leader)
    own_val = read_parts(config.val_dataset, 0.0, config, processor, leader)
    everything = parts + own_val
    num_rows = sum(len(part.mapped) for part in everything)
    refuse(_fates(everything, BAD), num_rows)

    train = _rows(parts, [part.train for part in parts], processor)
    val = _rows(own_val, [part.train for part in own_val], processor) if own_val else None
    if ratio > 0:
        val = _rows(parts, [part.val for part in parts], processor)
    deleted = _fates(everything, DELETED)
    _refuse_nothing(train, val, deleted)
    report = Report(
        num_rows=num_rows,
        num_train=len(train),
        num_val=0 if val is None else len(val),
        deleted=tuple(deleted),
        cut=tuple(_fates(everything, CUT)),
        num_train_tokens=int(train.lengths.sum()),
        longest_row=int(train.lengths.max()),
    )
    return Prepared(train, val, report, _digest(everything), tuple(parts) if ratio > 0 else ())


def _rows(parts: Sequence[Part], picks: Sequence[np.ndarray], processor: Processor) -> Rows:
    starts = np.cumsum([0] + [len(part.mapped) for part in parts])
    mapped = datasets.concatenate_datasets([part.mapped for part in parts])
    joined = np.concatenate([start + places for start, places in zip(starts, picks, strict=False)])
    return Rows(mapped, joined, processor)


def _fates(parts: Sequence[Part], outcome: int) -> list[Fate]:
    return [fate for part in parts for fate in part.fates(outcome)]


def _refuse_nothing(train: Rows, val: Rows | None, deleted: Sequence[Fate]) -> None:
    for rows, name in ((train, "train on"), (val, "validate with")):
        if rows is not None and len(rows) == 0:
            raise DataError(
                f"No row is left to {name}",
                got="".join(f"\n    {fate}" for fate in deleted[:5]) + f"\n    {len(deleted)} rows left out",
                do="raise max_length, or lower IMAGE_MAX_TOKEN_NUM",
            )


def _digest(parts: Sequence[Part]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        for chunk in part.mapped.data.column("input_ids").chunks:
            digest.update(chunk.flatten().to_numpy().tobytes())
        for numbers in (column(part.mapped, "length"), part.train, part.val):
            digest.update(numbers.tobytes())
    return digest.hexdigest()
