"""One rank's place in the job: its device, its process groups, and what saves need, made once at start."""

from __future__ import annotations

import datetime
import os
import random
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from landfall.coord.base import Coordinator
from landfall.coord.solo import SoloCoordinator
from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.sft.config import SftConfig

SENDING_BYTES = 4 << 20
"""A buffer for what one rank sends another of a matrix that they share (see engine.columns)."""


@dataclass(frozen=True)
class Runtime:
    """What every part of training needs to know about this rank."""

    rank: int
    world_size: int
    device: torch.device
    session: Session

    @property
    def coordinator(self) -> Coordinator:
        return self.session.coordinator

    def close(self) -> None:
        """Leave the conversation; rank 0, which holds the messages, waits a little for the others."""
        self.coordinator.close()

    @property
    def dp_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    @property
    def dp_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()


def start(config: SftConfig) -> Runtime:
    """Join the job that torchrun's environment describes; every rank calls it once."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _pick_device(rank)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        create_gloo_process_groups=False,
    )
    seed_all(config.seed)
    use_every_group(device)
    use_neighbours(device)
    coordinator = SoloCoordinator() if world_size == 1 else TCPStoreCoordinator.from_process_group()
    sending = Stager(device, SENDING_BYTES) if config.tensor_model_parallel_size > 1 else None
    return Runtime(
        rank,
        world_size,
        device,
        Session(coordinator, Stager(device), config.save_deadline_s, sending_stager=sending),
    )


def stop() -> None:
    """Take the process groups down, after a run that went well: after a failure others may be gone."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def use_every_group(device: torch.device) -> None:
    """Run each kind of collective once in every group that training will use.

    NCCL takes device memory for a communicator when it is first used, outside torch's allocator. Here there is
    room for it, and if there is none, the run fails now and not at its first evaluation or its last save.
    """
    for group in _groups_of_this_rank():
        size = dist.get_world_size(group)
        whole, part = torch.zeros(size, device=device), torch.zeros(1, device=device)
        dist.all_reduce(whole, group=group)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_neighbours(device: torch.device) -> None:
    """Send something to the neighbouring pipeline stages and get something from them, as training will."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    neighbours = []
    if not parallel_state.is_pipeline_first_stage():
        neighbours.append(parallel_state.get_pipeline_model_parallel_prev_rank())
    if not parallel_state.is_pipeline_last_stage():
        neighbours.append(parallel_state.get_pipeline_model_parallel_next_rank())
    group = parallel_state.get_pipeline_model_parallel_group()
    transfers = [
        dist.P2POp(transfer, torch.zeros(1, device=device), neighbour, group)
        for neighbour in neighbours
        for transfer in (dist.isend, dist.irecv)
    ]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()


def _groups_of_this_rank() -> list[dist.ProcessGroup]:
    """The world and parallel_state's groups with more than one rank, each once, in an order that is the same
    on all members of a group."""
    groups = [
        dist.group.WORLD,
        parallel_state.get_data_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_intra_distributed_optimizer_instance_group(),  # sums gradient norms
    ]
    if parallel_state.is_rank_in_embedding_group():  # first and last stage, which share a tied embedding
        groups.append(parallel_state.get_embedding_group())
    return [group for group in dict.fromkeys(groups) if group is not None and dist.get_world_size(group) > 1]


def seed_all(seed: int) -> None:
    """The same start on every rank of a model-parallel position, as Megatron seeds it: pipeline stages differ,
    and tensor-parallel ranks in the state that is meant for what they split."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _pick_device(rank: int) -> torch.device:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_devices = torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > num_devices:
        # NCCL refuses two ranks on one device unless it takes them for two hosts.
        os.environ.setdefault("NCCL_HOSTID", f"landfall-{rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", local_rank % num_devices)
    torch.cuda.set_device(device)
    return device
