"""Values that follow from others, and the rules that values have to keep together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from landfall.errors import UsageError
from landfall.sft.flags.environment import UNUSED_VARIABLES
from landfall.sft.flags.table import SftConfig
from landfall.sft.flags.unbuilt import asks_for_nothing

Source = Literal["default", "flag", "environment", "model", "derived"]

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MULTI_NODE_PORT = 29500
UNSET = "LANDFALL_UNSET"
"""The variables that the launcher found unset: what a rank sees in them is not the user's."""


class Draft:
    """Values on their way to a configuration."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self.values = dict(defaults)
        self.sources: dict[str, Source] = dict.fromkeys(defaults, "default")
        self.shown: dict[str, str] = {}
        self.notes: list[str] = []

    def set(self, name: str, value: Any, source: Source, shown: str = "") -> None:
        """``shown`` is the name under which the user gave it, if he did."""
        self.values[name], self.sources[name] = value, source
        if shown:
            self.shown[name] = shown

    def is_given(self, name: str) -> bool:
        return name in self.shown


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process is one rank that torchrun, or somebody like it, has started."""
    return all(name in environ for name in TORCHRUN_VARIABLES)


def complete(draft: Draft, environ: Mapping[str, str]) -> None:
    """Fill in what follows from other values."""
    _judge_unused_variables(draft, environ)
    if is_rank(environ):
        _take_ranks_from_torchrun(draft, environ)
    else:
        _check_nodes(draft)
    _decide_length(draft)
    values = draft.values
    if not values["save"] and values["model"]:
        draft.set("save", f"megatron_output/{PurePath(values['model']).name}", "derived")
    if values["eval_interval"] is None:
        draft.set("eval_interval", values["save_interval"], "derived")
    if values["val_dataset"] and values["split_dataset_ratio"]:
        draft.notes.append("--split_dataset_ratio has no effect, because there is a --val_dataset")
        draft.set("split_dataset_ratio", 0.0, "derived")
    if values["sequence_parallel"] and values["tensor_model_parallel_size"] == 1:
        draft.notes.append("--sequence_parallel has no effect with one tensor-parallel rank")
        draft.set("sequence_parallel", False, "derived")


def _judge_unused_variables(draft: Draft, environ: Mapping[str, str]) -> None:
    for variable in UNUSED_VARIABLES:
        text = environ.get(variable.name)
        if text is None or asks_for_nothing([variable.default], [text]):
            continue
        if variable.do:
            raise UsageError(f"{variable.name} is not used", got=repr(text), do=variable.do)
        draft.notes.append(f"{variable.name} has no effect: it is for videos, and landfall trains on images")


def _take_ranks_from_torchrun(draft: Draft, environ: Mapping[str, str]) -> None:
    """A rank knows how many there are from its launcher, whoever that was."""
    local = environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])
    world, per_node = int(environ["WORLD_SIZE"]), int(local)
    found = {
        "nproc_per_node": per_node,
        "nnodes": world // per_node,
        "node_rank": int(environ.get("GROUP_RANK", "0")),
    }
    for name, value in found.items():
        if draft.values[name] != value:
            draft.set(name, value, "environment")


def _check_nodes(draft: Draft) -> None:
    nodes, rank = draft.values["nnodes"], draft.values["node_rank"]
    if nodes > 1:
        for name, variable in (("node_rank", "NODE_RANK"), ("master_addr", "MASTER_ADDR")):
            if not draft.is_given(name):
                raise UsageError(
                    f"{variable} is not set",
                    got=f"NNODES={nodes}",
                    expected="NODE_RANK, and the same MASTER_ADDR and MASTER_PORT on every node",
                )
        if draft.values["master_port"] is None:
            draft.set("master_port", MULTI_NODE_PORT, "derived")
    if rank >= nodes:
        raise UsageError(
            "NODE_RANK is not one of the nodes",
            got=f"{rank}",
            expected=f"0 to {nodes - 1}, as NNODES={nodes}",
        )


def _decide_length(draft: Draft) -> None:
    """Epochs go before steps, as in ms-swift 3.12, which computes train_iters from them."""
    epochs, steps = draft.values["max_epochs"], draft.values["train_iters"]
    if epochs is not None and steps is not None:
        draft.notes.append(f"--train_iters {steps} has no effect, because --max_epochs {epochs} decides")
        draft.set("train_iters", None, "derived")


def from_model(config: SftConfig, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says about fields that are None in ``config``."""
    text_config = model_config.get("text_config")
    parts = [model_config, text_config] if isinstance(text_config, dict) else [model_config]
    found: dict[str, Any] = {}
    if config.bf16 is None:
        found["bf16"] = _is_bfloat16(_first(parts, "dtype", "torch_dtype"))
    if config.max_length is None:
        length = _first(parts, "max_position_embeddings")
        if not isinstance(length, int) or length < 1:
            raise UsageError(
                "the model's config.json has no max_position_embeddings",
                got=f"{length}",
                do="pass --max_length",
            )
        found["max_length"] = length
    return found


def _first(parts: list[Mapping[str, Any]], *names: str) -> Any:
    return next((part[name] for part in parts for name in names if part.get(name) is not None), None)


def _is_bfloat16(dtype: Any) -> bool:
    if dtype in ("bfloat16", "float32"):
        return bool(dtype == "bfloat16")
    raise UsageError(
        "the model's config.json does not say in which precision to train",
        got=f"dtype {dtype}",
        expected="bfloat16 or float32",
        do="pass --bf16 true, or false for float32",
    )


def check(config: SftConfig, draft: Draft) -> None:
    """The rules between values. What concerns one value only was checked when it was read."""
    _check_needed(config)
    _check_batches(config)
    _check_recompute(config)
    _check_learning_rate(config)
    if config.freeze_llm and config.freeze_vit and config.freeze_aligner:
        raise UsageError(
            "nothing would be trained",
            got="--freeze_llm, --freeze_vit and --freeze_aligner are all true",
            expected="at least one of them false",
        )
    if config.overlap_param_gather and not config.overlap_grad_reduce:
        raise UsageError(
            "--overlap_param_gather needs --overlap_grad_reduce", do="pass --overlap_grad_reduce true"
        )
    if config.finetune and draft.shown.get("load") == "--resume_from_checkpoint":
        raise UsageError(
            "--resume_from_checkpoint goes on with a run, --finetune true begins a new one",
            do="to go on pass --finetune false; to begin anew from a checkpoint's weights use --load",
        )


def _check_needed(config: SftConfig) -> None:
    if not config.model:
        raise UsageError("--model is missing", expected="the folder of a Qwen3-VL model, or its id on a hub")
    if not config.dataset:
        raise UsageError("--dataset is missing", expected="one or more files or ids")
    if config.max_epochs is None and config.train_iters is None:
        raise UsageError("it is not said how long to train", expected="--max_epochs or --train_iters")


def _check_batches(config: SftConfig) -> None:
    ranks, per_copy = config.world_size, config.model_parallel_size
    if ranks % per_copy:
        raise UsageError(
            "the ranks can't be shared out",
            got=f"{ranks} ranks (NPROC_PER_NODE x NNODES), {per_copy} for one copy of the model",
            expected=f"a multiple of {per_copy} ranks",
            do=_nearest_ranks(ranks, per_copy),
        )
    at_once = config.micro_batch_size * config.data_parallel_size
    if config.global_batch_size % at_once:
        lower = config.global_batch_size // at_once * at_once
        raise UsageError(
            "--global_batch_size can't be shared out",
            got=f"{config.global_batch_size}, with --micro_batch_size {config.micro_batch_size} on "
            f"{config.data_parallel_size} data-parallel ranks",
            expected=f"a multiple of {at_once}",
            do=f"the nearest are {lower} and {lower + at_once}" if lower else f"the smallest is {at_once}",
        )


def _nearest_ranks(ranks: int, per_copy: int) -> str:
    lower = ranks // per_copy * per_copy
    more = f"start {lower or per_copy}" + (f" or {lower + per_copy}" if lower else "") + " ranks"
    return f"{more}, or use smaller --tensor_, --pipeline_ or --context_ sizes"


def _check_recompute(config: SftConfig) -> None:
    """Megatron's rules: full says how and how much, anything else must not."""
    details = {
        "--recompute_method": config.recompute_method,
        "--recompute_num_layers": config.recompute_num_layers,
    }
    if config.recompute_granularity == "full":
        missing = [name for name, value in details.items() if value is None]
        if missing:
            raise UsageError(
                f"--recompute_granularity full needs {' and '.join(missing)}",
                do="for the least memory pass --recompute_method uniform --recompute_num_layers 1",
            )
        return
    extra = [f"{name} {value}" for name, value in details.items() if value is not None]
    if extra:
        raise UsageError(
            f"{' and '.join(extra)}: only for --recompute_granularity full",
            got=f"--recompute_granularity {config.recompute_granularity or 'none'}",
        )


def _check_learning_rate(config: SftConfig) -> None:
    for name in ("lr", "vit_lr", "aligner_lr"):
        highest = getattr(config, name)
        if highest is not None and config.min_lr > highest:
            raise UsageError(
                "--min_lr is too high", got=f"{config.min_lr}", expected=f"at most --{name}, {highest}"
            )
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        raise UsageError(
            "--lr_warmup_fraction and --lr_warmup_iters say the same thing twice",
            got=f"{config.lr_warmup_fraction} and {config.lr_warmup_iters}",
            expected="one of them",
        )
