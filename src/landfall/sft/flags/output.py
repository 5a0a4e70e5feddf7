"""Flags that say what a run writes, what it starts from, and when it evaluates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from landfall.sft.flags import spec

checkpoint_flag = partial(spec.flag, "Checkpoints")
evaluation_flag = partial(spec.flag, "Evaluation and logging")

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)


def size_bytes(text: str) -> int | None:
    """The bytes of a size like 5GB (10^9 each) or 5GiB (2^30 each); None if it is none, or below 1 byte."""
    match = SIZE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    return int(float(number) * unit) or None


@dataclass(frozen=True)
class OutputFlags:
    """Checkpoints, evaluation, logging."""

    save: str = checkpoint_flag(
        "",
        "The folder for everything that the run writes. On several nodes it has to be the same shared "
        "folder.",
        aliases=("output_dir",),
        check=spec.FOLDER,
        default_text="megatron_output/<name of the model>",
    )
    add_version: bool = checkpoint_flag(True, "Write into a new folder v<n>-<date>-<time> inside --save.")
    save_interval: int = checkpoint_flag(
        500,
        "Steps between checkpoints. There is one at the end of the training in any case.",
        aliases=("save_steps",),
        check=spec.COUNT,
    )
    no_save_optim: bool = checkpoint_flag(
        False,
        "Leave out the optimizer's state: a smaller checkpoint, from which training can't be continued "
        "exactly.",
    )
    no_save_rng: bool = checkpoint_flag(False, "Leave out the state of the random generators.")
    save_safetensors: bool = checkpoint_flag(
        True,
        "Also write the weights as a Hugging Face folder: safetensors, config.json, tokenizer, processor.",
    )
    max_shard_size: str = checkpoint_flag(
        "5GB",
        "The largest safetensors file: 5GB is 5*10^9 bytes, 5GiB 5*2^30.",
        check=spec.Check("a size such as 5GB or 500MB", lambda text: size_bytes(text) is not None),
    )
    save_total_limit: int | None = checkpoint_flag(
        None,
        "The most checkpoints of this run that are kept; the newest and the best are, in any case. Older ones "
        "are removed when a newer one is committed.",
        check=spec.COUNT,
        default_text="all are kept",
    )
    save_retain_interval: int | None = checkpoint_flag(
        None,
        "Of the older checkpoints keep only those whose step is a multiple of this.",
        check=spec.COUNT,
        default_text="all are kept",
    )
    metric_for_best_model: str | None = checkpoint_flag(
        None,
        "What makes a checkpoint the best one, which --save_total_limit never removes: the loss of the "
        "evaluation after the same step.",
        choices=("loss", "eval_loss"),
        default_text="none is the best",
    )
    greater_is_better: bool = checkpoint_flag(False, "Whether --metric_for_best_model is to be high.")
    on_save_error: str = checkpoint_flag(
        "retry",
        "What happens when a save fails: retry tries again after 1, 4 and 10 s, then trains on and saves at "
        "the next interval; continue trains on at once; stop ends the run. After the last step the run fails "
        "in any case.",
        choices=("retry", "continue", "stop"),
    )
    save_deadline_s: float = checkpoint_flag(
        600.0,
        "How long the ranks wait in a save for one that makes no progress, before they name it and end the "
        "run. A long write that goes on is no reason.",
        check=spec.POSITIVE,
    )
    exit_duration_in_mins: float | None = checkpoint_flag(
        None,
        "Minutes of training after which the run saves and ends with exit code 3. SIGTERM and SIGUSR1, to any "
        "rank or to the launcher, do the same with 143 and 138.",
        check=spec.POSITIVE,
        default_text="no limit",
    )
    load: str | None = checkpoint_flag(
        None,
        "The checkpoint to go on from: a checkpoint-N folder, or the folder of a run, whose newest good "
        "checkpoint is taken. --finetune says how much of it is used.",
        aliases=("mcore_model", "resume_from_checkpoint"),
        check=spec.FOLDER,
    )
    no_load_optim: bool = checkpoint_flag(False, "With --load: begin with a fresh optimizer.")
    no_load_rng: bool = checkpoint_flag(False, "With --load: seed the random generators afresh.")
    eval_interval: int | None = evaluation_flag(
        None,
        "Steps between evaluations.",
        aliases=("eval_steps",),
        check=spec.COUNT,
        default_text="--save_interval",
    )
    eval_iters: int = evaluation_flag(
        -1,
        "Global batches in an evaluation; -1 is the whole validation set, 0 none.",
        check=spec.COUNT_OR_ALL,
    )
    log_interval: int = evaluation_flag(
        5, "Steps between lines of the log.", aliases=("logging_steps",), check=spec.COUNT
    )
    report_to: tuple[str, ...] = evaluation_flag(
        ("tensorboard",),
        "Where the log goes besides the terminal and logging.jsonl.",
        choices=("tensorboard", "wandb", "swanlab"),
        built=("tensorboard",),
        do="leave it out, and read logging.jsonl or the tensorboard files from there",
    )
    tensorboard_dir: str | None = evaluation_flag(
        None, "The folder of the tensorboard files.", default_text="<save>/runs", check=spec.FOLDER
    )
