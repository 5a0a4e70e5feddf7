"""One dataset of several: which of its rows are taken, mapped, and set aside for validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from landfall.errors import DataError, UsageError
from landfall.sft.data.config import DataConfig
from landfall.sft.data.mapping import CUT, OK, RowMapper, map_rows
from landfall.sft.data.processor import Processor
from landfall.sft.data.report import Fate
from landfall.sft.data.rows import with_image_paths
from landfall.sft.data.sources import open_source
from landfall.sft.data.spec import DatasetSpec, parse_spec


@dataclass(frozen=True)
class Part:
    mapper: RowMapper
    mapped: datasets.Dataset
    train: np.ndarray
    """places in ``mapped`` of the rows to train on; rows that are repeated come several times"""
    val: np.ndarray
    """places in ``mapped`` of the rows set aside"""

    def outcomes(self) -> np.ndarray:
        return column(self.mapped, "outcome")

    def fates(self, outcome: int) -> list[Fate]:
        """Place and reason of the rows with this outcome."""
        (places,) = np.nonzero(self.outcomes() == outcome)
        found = self.mapped.select_columns(["source", "reason"]).select(places)
        return [Fate(row["source"], row["reason"]) for row in found]

    def split_off_rows(self) -> Iterator[dict[str, Any]]:
        """The rows set aside, as they were written, with absolute image paths."""
        for source_row in column(self.mapped, "source_row")[self.val].tolist():
            yield with_image_paths(self.mapper.source.row(source_row), self.mapper.image_path)


def read_parts(
    texts: Sequence[str], split_ratio: float, config: DataConfig, processor: Processor, leader: bool
) -> list[Part]:
    """Read the datasets that ``texts`` name. Their bad rows stay in ``mapped``."""
    cache_dir = Path(config.cache_dir)
    image_dir = cache_dir / "images"
    try:
        image_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("The cache folder can't be made", where=str(cache_dir), got=str(error)) from error
    parts = []
    for ordinal, spec in enumerate(map(parse_spec, texts)):
        source = open_source(spec, cache_dir)
        if len(source) == 0:
            raise DataError("A dataset has no rows", where=spec.text)
        mapper = RowMapper(source, processor, config.max_length, config.truncation_strategy, image_dir)
        random = np.random.RandomState([config.seed % 2**32, ordinal])
        parts.append(_read_part(mapper, spec, split_ratio, config, random, leader))
    return parts


def _read_part(
    mapper: RowMapper,
    spec: DatasetSpec,
    split_ratio: float,
    config: DataConfig,
    random: np.random.RandomState,
    leader: bool,
) -> Part:
    num_rows = len(mapper.source)
    picks = np.arange(num_rows)
    if spec.num_rows is not None:
        picks = np.sort(np.resize(random.permutation(num_rows), spec.num_rows))
    distinct, places = np.unique(picks, return_inverse=True)
    mapped = map_rows(
        mapper,
        distinct,
        Path(config.cache_dir),
        config.dataset_num_proc,
        use_cache=config.load_from_cache_file or not leader,
        trust_cache=not leader,
    )
    is_usable = np.isin(column(mapped, "outcome"), (OK, CUT))
    val = _set_aside(is_usable, split_ratio, random, spec.text)
    is_usable[val] = False
    return Part(mapper, mapped, train=places[is_usable[places]], val=val)


def column(mapped: datasets.Dataset, name: str) -> np.ndarray:
    return mapped.data.column(name).to_numpy()


def _set_aside(
    is_usable: np.ndarray, split_ratio: float, random: np.random.RandomState, text: str
) -> np.ndarray:
    (usable,) = np.nonzero(is_usable)
    if split_ratio == 0 or usable.size == 0:
        return usable[:0]
    num_val = max(int(usable.size * split_ratio), 1)
    if num_val == usable.size:
        raise UsageError(
            "A dataset is too small to set validation rows aside",
            where=text,
            got=f"{usable.size} usable rows",
            do="set split_dataset_ratio to 0, or give a val_dataset",
        )
    return np.sort(usable[random.permutation(usable.size)[:num_val]])
