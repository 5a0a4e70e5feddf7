"""What ``--dataset`` and ``--val_dataset`` name: ``path[#N]`` or ``[hf::]id[:subset][#N]``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from landfall.errors import UsageError

FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class DatasetSpec:
    text: str
    """as the user wrote it"""
    path: Path | None
    """a file, or a folder that the datasets library understands"""
    hub_id: str | None
    """an id on the Hugging Face hub"""
    subset: str | None
    num_rows: int | None
    """take so many rows, chosen at random; more than there are repeats rows"""


def parse_spec(text: str) -> DatasetSpec:
    """Raises UsageError for what is neither an existing path nor can be an id."""
    if _is_path(text):
        return DatasetSpec(text, Path(text).expanduser(), None, None, None)
    rest, num_rows = _split_count(text)
    if _is_path(rest):
        return DatasetSpec(text, Path(rest).expanduser(), None, None, num_rows)
    hub, _, name = rest.rpartition("::")
    if hub == "ms":
        raise UsageError(
            "ModelScope datasets are not fetched",
            where=f"--dataset {text}",
            do=f"run `modelscope download --dataset {name}` and give the path of its files",
        )
    name, _, subset = name.partition(":")
    if hub not in ("", "hf") or not _is_id(name):
        raise UsageError(
            "There is no such dataset file",
            where=f"--dataset {text}",
            expected=f"a {', '.join(FILE_TYPES)} file, a dataset folder, or hf::owner/name",
        )
    return DatasetSpec(text, None, name, subset or None, num_rows)


def _split_count(text: str) -> tuple[str, int | None]:
    rest, mark, count = text.rpartition("#")
    if not mark:
        return text, None
    if not count.isdecimal() or int(count) == 0:
        raise UsageError(
            "The number of rows after # must be at least 1", where=f"--dataset {text}", got=count or "nothing"
        )
    return rest, int(count)


def _is_path(text: str) -> bool:
    return bool(text) and Path(text).expanduser().exists()


def _is_id(name: str) -> bool:
    return (
        bool(name)
        and name.count("/") <= 1
        and not name.startswith(("/", ".", "~"))
        and Path(name).suffix not in FILE_TYPES
    )
