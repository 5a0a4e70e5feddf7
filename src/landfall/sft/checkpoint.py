"""What a training run saves and how it comes back: ms-swift's folders on the engine's saves."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from landfall.adapters.megatron_core import buckets, describe
from landfall.adapters.megatron_core.hugging_face import hugging_face_shards
from landfall.adapters.megatron_core.vocabulary import clear_padding, fit_padding
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import SAFETENSORS, TORCH_DIST, Contents, Safetensors, TorchDist
from landfall.engine.hugging_face import HuggingFaceFolder
from landfall.engine.latest import newest
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.stock import StockCheckpoint
from landfall.errors import CheckpointError, DamagedError, LandfallError, UsageError
from landfall.format import torch_dist
from landfall.format.hf_folder import plan_export
from landfall.format.manifest import Manifest
from landfall.format.safetensors import from_torch_dtype
from landfall.format.shards import Shard
from landfall.format.unpickle import load_object
from landfall.models.qwen3_vl import Qwen3VLNames
from landfall.sft import rng
from landfall.sft.config import SftConfig
from landfall.sft.folders import StockFolder, find_stock
from landfall.sft.runtime import Runtime
from landfall.store.local import LocalStore

TRACKER = "latest_checkpointed_iteration.txt"
RNG_KEY = "rng_state"
OPTIMIZER_FLAGS = (
    *("lr", "min_lr", "lr_decay_style", "lr_warmup_fraction", "lr_warmup_iters", "vit_lr", "aligner_lr"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "max_epochs", "train_iters"),
)
"""Flags that may change when a run goes on."""


@dataclass
class Trained:
    """All that training changes: what a checkpoint holds."""

    model: torch.nn.Module
    """The bare model, not its data-parallel wrapper."""
    optimizer: Any
    scheduler: Any
    names: Qwen3VLNames


class Position(msgspec.Struct, frozen=True):
    """Where training is in its data; kept in common.pt under ``landfall``."""

    step: int
    num_rows: int
    epoch_rows: int
    global_batch_size: int
    seed: int


@dataclass(frozen=True)
class Loaded:
    """What :func:`load_checkpoint` found; the same on every rank."""

    place: str
    position: Position | None
    """Where to go on; None if training starts at step 0, because of ``finetune``."""
    skipped: list[str]
    """Newer checkpoints that can't be used, each with the reason."""
    changed: list[str]
    """Flags that say something else about the optimizer than when the checkpoint was saved."""


def save_checkpoint(
    trained: Trained,
    folder: Path,
    config: SftConfig,
    runtime: Runtime,
    position: Position,
    files: dict[str, bytes],
    total_bytes: int = 0,
) -> Manifest:
    """Save checkpoint-N, every rank; committed on return, SaveError (and the older ones whole) otherwise.

    ``total_bytes`` is about what all ranks will write.

    From the first line to the last there is no collective and no device allocation.
    """
    step = position.step

    def contents() -> Contents:
        made = _contents(trained, config, runtime, position, files)
        return dataclasses.replace(made, total_bytes=total_bytes)

    return save(contents, LocalStore(folder), runtime.session, step=step)


def _contents(
    trained: Trained, config: SftConfig, runtime: Runtime, position: Position, files: dict[str, bytes]
) -> Contents:
    description = describe.describe_model(trained.model)
    iteration = f"iter_{position.step:07d}/"
    # As ms-swift: weights that are exported anyway are not saved twice unless the optimizer comes along.
    export_only = config.save_safetensors and config.no_save_optim
    shards = [] if export_only else describe.model_shards(description, to_save=True)
    objects = [] if export_only else list(description.objects)
    loads: dict[int, int] = {}
    if not config.no_save_optim:
        loads = describe.optimizer_loads(trained.optimizer, description)
        shards += describe.optimizer_shards(trained.optimizer, description, to_save=True)
    if not config.no_save_rng:
        objects += rng.object_shards(RNG_KEY, description.replicas.data)
    common = b""
    if runtime.rank == 0:
        common = torch_dist.object_bytes(_common(trained, config, position))
    safetensors = None
    if config.save_safetensors:
        exported = hugging_face_shards(description, trained.names.pieces, to_save=True)
        dtype = from_torch_dtype(exported[0].data.dtype)
        tensors = {name: (dtype, shape) for name, shape in trained.names.hf_shapes().items()}
        plan = plan_export(tensors, config.max_shard_size)
        safetensors = Safetensors(exported, plan, description.replicas.tensor_groups)
    folder_files = {**files, TRACKER: f"{position.step}\n".encode()} if runtime.rank == 0 else {}
    return Contents(
        TorchDist(shards, objects, common, iteration, loads),
        safetensors,
        folder_files,
        index_folder=iteration,
        notes={"optimizer": not config.no_save_optim, "rng": not config.no_save_rng},
    )


def _common(trained: Trained, config: SftConfig, position: Position) -> dict[str, Any]:
    """common.pt with the keys that Megatron's training knows, and ours under ``landfall``."""
    common: dict[str, Any] = {
        "args": argparse.Namespace(**msgspec.to_builtins(vars(config), builtin_types=())),
        "checkpoint_version": 3.0,
        "iteration": position.step,
        "content_metadata": dict(describe.METADATA),
        "landfall": msgspec.to_builtins(position),
    }
    if not config.no_save_optim:
        common["optimizer"] = describe.optimizer_common(trained.optimizer)
        common["opt_param_scheduler"] = trained.scheduler.state_dict()
    return common


def load_checkpoint(path: Path, trained: Trained, config: SftConfig, runtime: Runtime) -> Loaded:
    """Continue from a checkpoint, every rank: weights, and unless ``finetune`` all that training had.

    ``path`` is a checkpoint-N folder, a run or save folder that holds them, or one of stock megatron-core.
    Raises UsageError if it is not what this run can go on from, DamagedError if it can't be trusted.
    """
    opened, skipped = _open(path, runtime)
    with _fitting():
        position, changed = _load(opened, trained, config, runtime)
    return Loaded(opened.place, position, skipped, changed)


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """What is whole but of another model is for the user to change: a UsageError."""
    try:
        yield
    except DamagedError:
        raise
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def _load(
    opened: Checkpoint | StockCheckpoint, trained: Trained, config: SftConfig, runtime: Runtime
) -> tuple[Position | None, list[str]]:
    description = describe.describe_model(trained.model)
    if isinstance(opened, Checkpoint) and TORCH_DIST not in opened.manifest.content["formats"]:
        clear_padding(description, trained.names.text["vocab_size"])
        load(hugging_face_shards(description, trained.names.pieces, to_save=False), opened, SAFETENSORS)
    else:
        _load_here(describe.model_shards(description, to_save=False), opened, description, trained)
    trained.optimizer.reload_model_params()
    if config.finetune:
        return None, []
    common = load_object(_read_common(opened), opened.place)
    _check_resumable(common, opened, config)
    position = _position(common, config)
    if not config.no_load_optim:
        groups = common["optimizer"]
        if isinstance(opened, StockCheckpoint) and groups.get("param_state_sharding_type") == buckets.KIND:
            buckets.load_buckets(trained.optimizer, opened)
            groups = buckets.read_groups(trained.optimizer, opened)
        else:
            shards = describe.optimizer_shards(trained.optimizer, description, to_save=False)
            _load_here(shards, opened, description, trained)
        describe.restore_optimizer_common(trained.optimizer, groups)
    if not config.no_load_rng:
        _restore_rng(opened, runtime)
    return position, _changed_flags(common, config)


def _changed_flags(common: dict[str, Any], config: SftConfig) -> list[str]:
    """What this run does otherwise from here on than the run that saved; the flags of this run count."""
    saved = common.get("args")
    return [
        f"--{name} {getattr(config, name)} (was {getattr(saved, name)})"
        for name in OPTIMIZER_FLAGS
        if hasattr(saved, name) and getattr(saved, name) != getattr(config, name)
    ]


def _load_here(
    shards: list[Shard],
    opened: Checkpoint | StockCheckpoint,
    description: describe.ModelDescription,
    trained: Trained,
) -> None:
    """Load what this layout asks for from whatever layout the checkpoint was saved in."""
    vocab_size = trained.names.text["vocab_size"]
    load(fit_padding(shards, opened, TORCH_DIST, description.padded_keys, vocab_size), opened, TORCH_DIST)


def _position(common: dict[str, Any], config: SftConfig) -> Position:
    if "landfall" in common:
        return msgspec.convert(common["landfall"], Position)
    # a stock checkpoint knows the iteration but not the data position
    return Position(int(common["iteration"]), 0, 0, config.global_batch_size, config.seed)


def load_weights(folder: Path, model: torch.nn.Module, names: Qwen3VLNames) -> None:
    """Fill a model from a Hugging Face folder; each rank reads what it holds. UsageError if it does not fit."""
    description = describe.describe_model(model)
    clear_padding(description, names.text["vocab_size"])
    with _fitting():
        shards = hugging_face_shards(description, names.pieces, to_save=False)
        load(shards, HuggingFaceFolder(folder), SAFETENSORS)


def _open(path: Path, runtime: Runtime) -> tuple[Checkpoint | StockCheckpoint, list[str]]:
    """Rank 0 picks (and verifies) what is loaded, so that all ranks load the same; and what it skipped."""
    choice: dict[str, Any] = {}
    if runtime.rank == 0:
        try:
            choice = _choose(path)
        except LandfallError as error:
            choice = {"error": str(error), "code": error.exit_code}
    choice = json.loads(
        runtime.coordinator.from_rank0("load/choice", json.dumps(choice).encode(), runtime.session.deadline_s)
    )
    if "error" in choice:
        kind = UsageError if choice["code"] == UsageError.exit_code else DamagedError
        raise kind(choice["error"])
    store = LocalStore(choice["folder"])
    if choice["stock"]:
        return StockCheckpoint(store, choice["stock"]), []
    checkpoint = Checkpoint(store)
    if checkpoint.manifest.save_id != choice["save_id"]:
        raise DamagedError(
            "This rank sees another checkpoint than rank 0",
            where=f"rank {runtime.rank}, {checkpoint.place}",
            got=checkpoint.manifest.save_id,
            expected=choice["save_id"],
            do="load from a file system that is shared by all nodes",
        )
    return checkpoint, choice["skipped"]


def _choose(path: Path) -> dict[str, Any]:
    stock: StockFolder | None = find_stock(path)
    if stock is not None:
        return {"folder": str(stock.folder), "stock": stock.iteration, "save_id": "", "skipped": []}
    found = newest(path)
    return {"folder": str(found.folder), "stock": "", "save_id": found.save_id, "skipped": found.skipped}


def _read_common(opened: Checkpoint | StockCheckpoint) -> bytes:
    if isinstance(opened, StockCheckpoint):
        return opened.read_common()
    name = next(name for name in opened.manifest.published if name.endswith(torch_dist.COMMON))
    return opened.read_file(name)


def _check_resumable(common: dict[str, Any], opened: Checkpoint | StockCheckpoint, config: SftConfig) -> None:
    missing = []
    if not config.no_load_optim and "optimizer" not in common:
        missing.append("optimizer state (it was saved with --no_save_optim)")
    if not config.no_load_rng and not _rng_records(opened):
        missing.append("random number states (it was saved with --no_save_rng; --no_load_rng does without)")
    if missing:
        raise UsageError(
            "Training can't be continued from this checkpoint as if it had never stopped",
            where=opened.place,
            got="no " + ", and no ".join(missing),
            do="--finetune true starts at step 0 from its weights; --no_load_optim true and --no_load_rng true "
            "continue at its step without them",
        )


def _rng_records(opened: Checkpoint | StockCheckpoint) -> dict[str, Any]:
    objects = opened.objects(TORCH_DIST)
    return {key: record for key, record in objects.items() if key.startswith(f"{RNG_KEY}/")}


def _restore_rng(opened: Checkpoint | StockCheckpoint, runtime: Runtime) -> None:
    records = _rng_records(opened)
    key = rng.object_key(RNG_KEY)
    if key not in records:
        return  # saved in another tensor- or pipeline-parallel layout: fresh states, from the seed
    rng.restore(load_object(opened.read_object(records[key]), opened.place))
