"""Where rows come from: a file of lines, or a table. A source reads one row at a time, in any process."""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from landfall.errors import DataError, UsageError
from landfall.sft.data.spec import FILE_TYPES, DatasetSpec


class Source(ABC):
    """Rows of one dataset, numbered from 0. Picklable."""

    name: str
    """the path, or the id"""
    fingerprint: str
    """changes when the rows may have changed"""
    folder: Path | None
    """what image paths are relative to"""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Any:
        """The row as written. Raises DataError, whose ``what`` is the reason, if it is no JSON."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Where the row is, for messages: ``file:line``."""


class LineSource(Source):
    """A jsonl file. Only the places of its lines are held; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.name, self.fingerprint, self.folder = str(path), _stat_fingerprint(path), path.parent
        numbers, starts, offset = [], [], 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    numbers.append(number)
                    starts.append(offset)
                offset += len(line)
        self._numbers, self._starts = np.array(numbers, dtype=np.int64), np.array(starts, dtype=np.int64)
        self._file: io.BufferedReader | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Any:
        if self._file is None:
            self._file = open(self.name, "rb")  # noqa: SIM115  # stays open for the next rows
        self._file.seek(int(self._starts[index]))
        try:
            return json.loads(self._file.readline())
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
            raise DataError(f"broken JSON: {error}") from None
        except RecursionError:
            raise DataError("broken JSON: nested too deeply") from None

    def place(self, index: int) -> str:
        return f"{self.name}:{self._numbers[index]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


class TableSource(Source):
    """Rows that are at hand by number: a table of the datasets library, or a list."""

    def __init__(self, rows: Any, name: str, fingerprint: str, folder: Path | None) -> None:
        self.name, self.fingerprint, self.folder, self._rows = name, fingerprint, folder, rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        return self._rows[index]

    def place(self, index: int) -> str:
        return f"{self.name}[row {index + 1}]"


class CsvSource(TableSource):
    """A csv file with a header; every value is text. Rows are named by the line that they end on."""

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(1 << 30)
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="_too_many", restval=None)
            rows = [(reader.line_num, row) for row in reader]
        super().__init__([row for _, row in rows], str(path), _stat_fingerprint(path), path.parent)
        self._numbers = [number for number, _ in rows]

    def row(self, index: int) -> Any:
        row = self._rows[index]
        if "_too_many" in row or None in row.values():
            raise DataError("the row has not as many values as the header")
        return row

    def place(self, index: int) -> str:
        return f"{self.name}:{self._numbers[index]}"


def open_source(spec: DatasetSpec, cache_dir: Path) -> Source:
    """Raises UsageError for a file of an unknown type, an unreadable one, and an id that can't be fetched."""
    path = spec.path
    try:
        if path is None or path.is_dir():
            return _library_source(spec, cache_dir)
        if path.suffix == ".csv":
            return CsvSource(path)
        if path.suffix == ".parquet":
            rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(cache_dir))
            return TableSource(_undecoded(rows), str(path), _stat_fingerprint(path), path.parent)
        if path.suffix in (".json", ".jsonl"):
            return _json_source(path)
    except (OSError, ValueError, csv.Error, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            "A dataset can't be read",
            where=f"--dataset {spec.text}",
            got=f"{type(error).__name__}: {error}",
            do="" if path else "without a network, give the path of downloaded files",
        ) from error
    raise UsageError(
        "Unknown type of dataset file", where=f"--dataset {spec.text}", expected=", ".join(FILE_TYPES)
    )


def _json_source(path: Path) -> Source:
    """A list of rows, or one row a line."""
    with open(path, "rb") as file:
        start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        return LineSource(path)
    rows: Sequence[Any] = json.loads(path.read_bytes())
    return TableSource(rows, str(path), _stat_fingerprint(path), path.parent)


def _library_source(spec: DatasetSpec, cache_dir: Path) -> Source:
    if spec.path is not None and (spec.path / "state.json").exists():
        rows = datasets.load_from_disk(str(spec.path))
    else:
        name = str(spec.path or spec.hub_id)
        rows = datasets.load_dataset(name, spec.subset, split="train", cache_dir=str(cache_dir))
    return TableSource(_undecoded(rows), spec.text, rows._fingerprint, spec.path)


def _undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    """``rows`` with images as the bytes of their files."""
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows


def _stat_fingerprint(path: Path) -> str:
    stat = path.stat()
    return f"{path.absolute()}:{stat.st_size}:{stat.st_mtime_ns}"
