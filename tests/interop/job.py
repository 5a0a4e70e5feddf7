"""A trained tiny model with its optimizer on every rank, saved and loaded by stock megatron-core or by us."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from landfall.adapters.megatron_core import describe
from landfall.coord.solo import SoloCoordinator
from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.engine.stock import StockCheckpoint
from landfall.format import torch_dist
from landfall.format.unpickle import load_object
from landfall.sft.model.build import ModelOptions
from landfall.sft.model.step import train_step
from landfall.sft.optim import OptimizerOptions, allocate_state, build_optimizer, wrap_ddp
from landfall.store.local import LocalStore
from tests.sft.model import tiny, training

METADATA = describe.METADATA


@dataclass
class Job:
    model: torch.nn.Module
    wrapped: Any
    optimizer: Any
    scheduler: Any
    plan: training.Plan
    session: Session

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            batches = training.micro_batches(self.plan, step)
            losses.append(train_step(self.wrapped, self.optimizer, self.scheduler, batches).loss)
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Every parameter, and what this rank owns of the optimizer, by place."""
        found = {f"model.{name}": p.detach().clone() for name, p in self.model.named_parameters()}
        description = describe.describe_model(self.model)
        for shard in describe.optimizer_shards(self.optimizer, description, to_save=False):
            found[f"{shard.key}@{shard.box}"] = shard.data.clone()
        return found


def start(
    bf16: bool,
    seed: int = 3,
    tied: bool = True,
    session: Session | None = None,
    options: ModelOptions | None = None,
) -> Job:
    """A job on this rank; with the ``session`` of another one, beside it in the same process groups."""
    options = options or ModelOptions(bf16=bf16)
    if session is None:
        tiny.join(options)
    plan = training.Plan(options=options, micro_batch_size=2, tied=tied)
    model = tiny.make(tiny.reference(tiny.config(tied), seed), options)
    settings = OptimizerOptions(**{**vars(training.OPTIMIZER), "bf16": bf16})
    wrapped = wrap_ddp(model, settings)
    optimizer, scheduler = build_optimizer(wrapped, settings)
    allocate_state(optimizer)
    return Job(model, wrapped, optimizer, scheduler, plan, session or start_session())


def start_session() -> Session:
    alone = dist.get_world_size() == 1
    coordinator = SoloCoordinator() if alone else TCPStoreCoordinator.from_process_group()
    return Session(coordinator, Stager(torch.device("cpu")), deadline_s=60)


def save_ours(job: Job, folder: Path, step: int) -> None:
    description = describe.describe_model(job.model)
    shards = describe.model_shards(description, to_save=True)
    shards += describe.optimizer_shards(job.optimizer, description, to_save=True)
    common = {
        "iteration": step,
        "content_metadata": METADATA,
        "optimizer": describe.optimizer_common(job.optimizer),
        "opt_param_scheduler": job.scheduler.state_dict(),
    }
    part = TorchDist(shards, description.objects, torch_dist.object_bytes(common))
    save(Contents(part), LocalStore(folder), job.session, step=step)


def load_ours(job: Job, source: Any) -> None:
    description = describe.describe_model(job.model)
    shards = describe.model_shards(description, to_save=False)
    shards += describe.optimizer_shards(job.optimizer, description, to_save=False)
    load(shards, source, TORCH_DIST)
    data = (
        source.read_common() if isinstance(source, StockCheckpoint) else source.read_file(torch_dist.COMMON)
    )
    common = load_object(data, source.place)
    describe.restore_optimizer_common(job.optimizer, common["optimizer"])
    job.scheduler.load_state_dict(common["opt_param_scheduler"])


def stock_state(job: Job, kind: str, is_loading: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**METADATA, "distrib_optim_sharding_type": kind, "dp_cp_group": group}
    model = job.model.sharded_state_dict(metadata=metadata)
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        "opt_param_scheduler": job.scheduler.state_dict(),
        "iteration": 0,
    }


def save_stock(job: Job, folder: Path, kind: str = "fully_reshardable") -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, True)
    metadata = {**METADATA, "distrib_optim_sharding_type": kind}
    dist_checkpointing.save(stock_state(job, kind, False), str(folder), strategy, content_metadata=metadata)


def load_stock(job: Job, folder: Path, kind: str = "fully_reshardable") -> int:
    loaded = dist_checkpointing.load(stock_state(job, kind, True), str(folder))
    job.model.load_state_dict(loaded["model"])
    with torch.no_grad():
        job.optimizer.load_state_dict(loaded["optimizer"])
    job.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return int(loaded["iteration"])
