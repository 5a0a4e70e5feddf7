"""Everything before the first step. What can fail at start fails here, on every rank, with one message."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from landfall import __version__
from landfall.errors import UsageError
from landfall.models.qwen3_vl import Qwen3VLNames, padded_vocab_size
from landfall.sft.agree import Together
from landfall.sft.checkpoint import Loaded, Position, Trained, load_checkpoint, load_weights
from landfall.sft.config import Resolved, SftConfig
from landfall.sft.data.dataset import DataConfig, Prepared, prepare
from landfall.sft.data.processor import Processor
from landfall.sft.data.sampler import Stream, epoch_rows, train_iters
from landfall.sft.folders import new_run_folder
from landfall.sft.model.build import ModelOptions, build_model
from landfall.sft.model.freeze import apply_freeze
from landfall.sft.optim import OptimizerOptions, allocate_state, build_optimizer, build_scheduler, wrap_ddp
from landfall.sft.rehearse import forget_rehearsal, rehearse
from landfall.sft.report import Report, show_configuration
from landfall.sft.runtime import Runtime

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*token*.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
)
"""What a Hugging Face folder has beside the weights; kept as it is."""


LONGEST_WAIT_S = 12 * 3600.0
"""How long a start-up step may take on one rank while the others wait: reading a large dataset does."""


@dataclass
class Run:
    """A run that is ready to train."""

    config: SftConfig
    runtime: Runtime
    folder: Path
    model_files: dict[str, bytes]
    """What each checkpoint gets beside the weights; on rank 0."""
    data: Prepared
    trained: Trained
    ddp: torch.nn.Module
    stream: Stream
    position: Position
    num_steps: int
    report: Report

    @property
    def eval_interval(self) -> int:
        return self.config.eval_interval or self.config.save_interval

    @property
    def num_eval_iters(self) -> int:
        """Global batches in an evaluation."""
        if self.config.eval_iters >= 0 or self.data.val is None:
            return max(self.config.eval_iters, 0)
        return -(-len(self.data.val) // self.config.global_batch_size)


def prepare_run(resolved: Resolved, model_folder: Path, runtime: Runtime) -> Run:
    """Read data, build the model, load what is to be loaded, rehearse a save. Every rank calls it."""
    config = resolved.config
    together = Together(runtime.coordinator, min(60.0 * config.distributed_timeout_minutes, LONGEST_WAIT_S))
    if runtime.rank == 0:
        show_configuration(resolved)
    data = _prepare_data(config, model_folder, together)
    with together.step("model"):
        start = _start_position(config, data, runtime)
        num_steps = _count_steps(config, start)
        trained, ddp = _build(config, model_folder, num_steps)
    position, loaded = start, None
    if config.load is not None:
        with together.step("load"):
            loaded = load_checkpoint(Path(config.load), trained, config, runtime)
            position = _resume(loaded, start)
            num_steps = _count_steps(config, position)
            rows_seen = position.step * position.global_batch_size
            options = _optimizer_options(config, num_steps)
            trained.scheduler = build_scheduler(trained.optimizer, options, rows_seen)
    folder = _make_run_folder(config, runtime, together)
    model_files = _read_model_files(model_folder, resolved) if runtime.rank == 0 else {}
    try:
        with together.step("rehearsal"):
            rehearse(folder, trained, config, runtime)
    finally:
        if runtime.rank == 0:
            forget_rehearsal(folder)
    with together.step("run files"):
        if runtime.rank == 0:
            _write_run_files(folder, data, model_files)
        report = Report(config, folder, num_steps, position.step, runtime.rank == 0)
    _introduce(report, folder, data, position, num_steps, loaded)
    stream = Stream(len(data.train), position.epoch_rows, config.global_batch_size, config.seed)
    return Run(config, runtime, folder, model_files, data, trained, ddp, stream, position, num_steps, report)


def _prepare_data(config: SftConfig, model_folder: Path, together: Together) -> Prepared:
    """The first rank of each node reads and maps the rows, the others take what it kept."""
    is_leader = os.environ.get("LOCAL_RANK", "0") == "0"
    data_config = DataConfig(
        dataset=config.dataset,
        cache_dir=str(_cache_folder() / "rows"),
        val_dataset=config.val_dataset,
        split_dataset_ratio=config.split_dataset_ratio,
        max_length=config.max_length,
        truncation_strategy=config.truncation_strategy,
        load_from_cache_file=config.load_from_cache_file,
        dataset_num_proc=config.dataset_num_proc,
        seed=config.seed,
    )
    with together.step("processor"):
        processor = Processor.from_folder(model_folder, config.image_max_token_num)
    data: Prepared | None = None
    with together.step("data"):
        if is_leader:
            data = prepare(data_config, processor)
    with together.step("data of the other ranks"):
        if data is None:
            data = prepare(data_config, processor, leader=False)
    together.same("the rows to train on", data.digest)
    return data


def _cache_folder() -> Path:
    return Path(os.environ.get("LANDFALL_CACHE") or Path.home() / ".cache" / "landfall")


def _start_position(config: SftConfig, data: Prepared, runtime: Runtime) -> Position:
    num_rows = len(data.train)
    rows = epoch_rows(num_rows, config.micro_batch_size, runtime.dp_size)
    return Position(0, num_rows, rows, config.global_batch_size, config.seed)


def _count_steps(config: SftConfig, start: Position) -> int:
    if config.max_epochs is None:
        assert config.train_iters is not None
        return config.train_iters
    return train_iters(start.epoch_rows, config.global_batch_size, config.max_epochs)


def _build(config: SftConfig, model_folder: Path, num_steps: int) -> tuple[Trained, torch.nn.Module]:
    model_config = json.loads((model_folder / "config.json").read_bytes())
    options = ModelOptions(
        bf16=bool(config.bf16),
        attention_softmax_in_fp32=config.attention_softmax_in_fp32,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        vit_gradient_checkpointing=config.vit_gradient_checkpointing,
        cross_entropy_loss_fusion=config.cross_entropy_loss_fusion,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )
    model = build_model(model_config, options)
    rows = padded_vocab_size(
        model_config["text_config"]["vocab_size"],
        options.make_vocab_size_divisible_by,
        options.tensor_model_parallel_size,
    )
    names = Qwen3VLNames.from_config(model_config, vocab_rows=rows)
    if config.load is None:
        load_weights(model_folder, model, names)
    apply_freeze(model, config.freeze_llm, config.freeze_vit, config.freeze_aligner)
    optimizer_options = _optimizer_options(config, num_steps)
    ddp = wrap_ddp(model, optimizer_options)
    optimizer, scheduler = build_optimizer(ddp, optimizer_options)
    allocate_state(optimizer)
    return Trained(model, optimizer, scheduler, names), ddp


def _optimizer_options(config: SftConfig, num_steps: int) -> OptimizerOptions:
    return OptimizerOptions(
        lr=config.lr,
        train_iters=num_steps,
        global_batch_size=config.global_batch_size,
        min_lr=config.min_lr,
        lr_decay_style=config.lr_decay_style,
        lr_warmup_fraction=config.lr_warmup_fraction,
        lr_warmup_iters=config.lr_warmup_iters,
        vit_lr=config.vit_lr,
        aligner_lr=config.aligner_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=bool(config.bf16),
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )


def _resume(loaded: Loaded, start: Position) -> Position:
    """The position to go on from: the checkpoint's, if it is a continuation of the same data."""
    found = loaded.position
    if found is None:
        return start
    if found.epoch_rows == 0:  # a stock checkpoint knows its step only
        return Position(found.step, start.num_rows, start.epoch_rows, start.global_batch_size, start.seed)
    for name in ("num_rows", "global_batch_size", "seed"):
        saved, now = getattr(found, name), getattr(start, name)
        if saved != now:
            raise UsageError(
                "Training can't go on where it stopped, because the order of the data would be another",
                where=loaded.place,
                got=f"{name} {now}",
                expected=f"{name} {saved}, as when the checkpoint was saved",
                do="restore it, or pass --finetune true to start at step 0 from the checkpoint's weights",
            )
    return found


def _make_run_folder(config: SftConfig, runtime: Runtime, together: Together) -> Path:
    """Rank 0 picks the folder and tells the others."""
    folder = ""
    with together.step("run folder"):
        if runtime.rank == 0:
            folder = str(new_run_folder(Path(config.save), config.add_version).absolute())
    told = runtime.coordinator.from_rank0("run folder", folder.encode(), runtime.session.deadline_s)
    return Path(told.decode())


def _read_model_files(model_folder: Path, resolved: Resolved) -> dict[str, bytes]:
    """The files that make a checkpoint a Hugging Face folder, and args.json."""
    files = {path.name: path.read_bytes() for name in MODEL_FILES for path in model_folder.glob(name)}
    config = json.loads(files["config.json"])
    dtype = "bfloat16" if resolved.config.bf16 else "float32"
    for part in (config, config["text_config"], config["vision_config"]):
        part.update({name: dtype for name in ("dtype", "torch_dtype") if name in part})
    files["config.json"] = _json(config)
    versions = {"landfall": __version__} | {
        name: version(name) for name in ("torch", "megatron-core", "transformers")
    }
    files["args.json"] = _json({**resolved.to_args_json(), "versions": versions})
    return files


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_run_files(folder: Path, data: Prepared, model_files: dict[str, bytes]) -> None:
    (folder / "args.json").write_bytes(model_files["args.json"])
    if next(data.split_off_rows(), None) is not None:
        data.write_split_off(folder / "val_dataset.jsonl")


def _introduce(
    report: Report, folder: Path, data: Prepared, position: Position, num_steps: int, loaded: Loaded | None
) -> None:
    for line in [
        *data.report.lines(),
        *(f"skipped {skipped}" for skipped in (loaded.skipped if loaded else [])),
        *(f"goes on with {changed}" for changed in (loaded.changed if loaded else [])),
    ]:
        report.say(line)
    begins = f"goes on after step {position.step}" if position.step else "begins"
    source = f" from {loaded.place}" if loaded else ""
    report.say(f"training {begins}{source}, {num_steps} steps, in {folder}")
    if position.step >= num_steps:
        report.say("there is nothing left to train: the checkpoint is of the last step")
