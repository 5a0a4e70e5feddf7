"""Flags that say which rows are trained on and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from landfall.sft.flags import spec

data_flag = partial(spec.flag, "Data")


@dataclass(frozen=True)
class DataFlags:
    """Where rows come from. ``max_length`` is None until the model's config.json has been read."""

    dataset: tuple[str, ...] = data_flag(
        (),
        "What to train on: one or more of [hf::|ms::]path_or_id[:subset][#N], where N is how many rows to "
        "take. Files may be jsonl, json, csv, txt or parquet.",
        default_text="needed",
    )
    val_dataset: tuple[str, ...] = data_flag(
        (), "What to validate on, written like --dataset. With it nothing is split off from --dataset."
    )
    split_dataset_ratio: float = data_flag(
        0.0,
        "The share of each --dataset that is set aside for validation, at least one row; 0 sets nothing "
        "aside.",
        check=spec.SHARE,
    )
    load_from_cache_file: bool = data_flag(
        False, "Use what an earlier run prepared from the same files with the same settings."
    )
    dataset_num_proc: int = data_flag(1, "Processes that prepare the rows.", check=spec.COUNT)
    num_workers: int = data_flag(
        4,
        "Processes per rank that load images while the model computes; 0 loads them in between.",
        aliases=("dataloader_num_workers",),
        check=spec.COUNT_OR_ZERO,
    )
    max_length: int | None = data_flag(
        None,
        "The longest row, in tokens; longer ones are treated as --truncation_strategy says.",
        check=spec.COUNT,
        default_text="the model's maximum",
    )
    truncation_strategy: str = data_flag(
        "delete",
        "What happens to a row that is too long: delete leaves it out and counts it, left and right cut it "
        "on that side but never inside an image, raise stops.",
        choices=("delete", "left", "right", "raise", "split"),
        built=("delete", "left", "right", "raise"),
        do="split the rows beforehand, or use delete",
    )
    packing: bool = data_flag(
        False,
        "Join rows to batches of --max_length tokens.",
        built=(False,),
        do="leave it out, and raise --micro_batch_size: its rows are joined without padding (--padding_free)",
    )
    padding_free: bool = data_flag(
        True,
        "Join the rows of a micro batch end to end, so that nothing is padded.",
        built=(True,),
        do="leave it out: the loss is the same, and padding only costs time",
    )
