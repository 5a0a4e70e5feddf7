"""A small real save before the first step: what would fail at step 10,000 fails now."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

import torch

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.errors import CheckpointError, SaveError, UsageError
from landfall.format.shards import Box, Shard, whole
from landfall.format.torch_dist import object_bytes
from landfall.sft.checkpoint import Trained
from landfall.sft.config import SftConfig
from landfall.sft.model.freeze import part_of
from landfall.sft.runtime import Runtime
from landfall.store.local import LocalStore

FOLDER = ".landfall-rehearsal"
ROW = 1024


def rehearse(folder: Path, trained: Trained, config: SftConfig, runtime: Runtime) -> None:
    """Every rank saves a row into ``folder`` and reads everybody's back; then the free space is compared.

    Raises UsageError with what the real save would have met: no permission, no room, a folder that the
    ranks don't share.
    """
    place = folder / FOLDER
    rows = torch.full((1, ROW), float(runtime.rank), device=runtime.device)
    shape = (runtime.world_size, ROW)
    mine = Shard("rehearsal", shape, Box((runtime.rank, 0), (1, ROW)), rows, (runtime.rank,))
    everyones = torch.zeros(shape)
    try:
        save(Contents(TorchDist([mine], [], object_bytes({}))), LocalStore(place), runtime.session, step=0)
        load(
            [Shard("rehearsal", shape, whole(shape), everyones, (0,))],
            Checkpoint(LocalStore(place)),
            TORCH_DIST,
        )
    except (SaveError, CheckpointError) as error:
        raise UsageError(
            f"A rehearsal of the save failed: checkpoints could not be saved.\n{error}"
        ) from error
    if not torch.equal(everyones[:, 0], torch.arange(runtime.world_size).float()):
        raise UsageError("A rehearsal of the save read back other numbers than were saved", where=str(place))
    if runtime.rank == 0:
        _check_room(folder, trained, config)


def forget_rehearsal(folder: Path) -> None:
    """Remove what was rehearsed. Rank 0 calls it when all ranks have read it."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / FOLDER)


def _check_room(folder: Path, trained: Trained, config: SftConfig) -> None:
    needed = checkpoint_bytes(trained, config)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            "There is no room for a single checkpoint",
            where=str(folder),
            got=f"{free:,} bytes free",
            expected=f"about {needed:,} bytes for each checkpoint",
            do="free space, choose another --save, or leave out the optimizer with --no_save_optim true",
        )


def checkpoint_bytes(trained: Trained, config: SftConfig) -> int:
    """About what one checkpoint takes, of the whole model: formats add a few percent at most."""
    frozen = {"llm": config.freeze_llm, "vit": config.freeze_vit, "aligner": config.freeze_aligner}
    sizes = {name: math.prod(shape) for name, shape in trained.names.megatron_shapes().items()}
    weights = sum(sizes.values()) * next(trained.model.parameters()).element_size()
    moments = 3 * 4 * sum(size for name, size in sizes.items() if not frozen[part_of(name)])
    num_copies = int(config.save_safetensors) + int(not (config.save_safetensors and config.no_save_optim))
    return weights * num_copies + (0 if config.no_save_optim else moments)
