"""What ``prepare`` is told."""

from __future__ import annotations

from dataclasses import dataclass

from landfall.errors import UsageError
from landfall.sft.data.truncate import check_strategy


@dataclass(frozen=True)
class DataConfig:
    dataset: tuple[str, ...]
    """each ``path[#N]`` or ``[hf::]id[:subset][#N]``"""
    cache_dir: str
    """where mapped rows are kept; the ranks of one host share it"""
    val_dataset: tuple[str, ...] = ()
    split_dataset_ratio: float = 0.0
    """share of each dataset that is set aside for validation; without effect if ``val_dataset`` is given"""
    max_length: int | None = None
    """tokens of a row, image tokens included; None: no limit"""
    truncation_strategy: str = "delete"
    """what becomes of longer rows: delete, raise, left (the beginning is cut off), right (the end)"""
    load_from_cache_file: bool = False
    dataset_num_proc: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        check_strategy(self.truncation_strategy)
        if not self.dataset:
            raise UsageError("No dataset is given", do="pass --dataset FILE")
        if not 0 <= self.split_dataset_ratio < 1:
            raise UsageError(
                "split_dataset_ratio must be at least 0 and less than 1", got=str(self.split_dataset_ratio)
            )
        for name, value in (("max_length", self.max_length), ("dataset_num_proc", self.dataset_num_proc)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1", got=str(value))

    @property
    def split_ratio(self) -> float:
        """The share that is really set aside."""
        return 0.0 if self.val_dataset else self.split_dataset_ratio
