"""A program that saves with stock megatron-core, as a training script does that knows nothing of landfall."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def stock_save(folder: str) -> None:
    """Save one replicated tensor of 64 KiB a rank through the strategy that Megatron-LM and ms-swift use."""
    from landfall.sft import cpu

    cpu.install()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    parallel_state.initialize_model_parallel()
    group = parallel_state.get_data_parallel_group()
    weights = torch.arange(16384.0)
    shard = ShardedTensor.from_rank_offsets("weights", weights, replica_id=dist.get_rank())
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist_checkpointing.save({"weights": shard}, folder, strategy)


def restored_ok(folder: str) -> bool:
    """Whether stock megatron-core reads the tensor back."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    empty = ShardedTensor.from_rank_offsets("weights", torch.zeros(16384), replica_id=dist.get_rank())
    loaded = dist_checkpointing.load({"weights": empty}, folder)
    return bool(torch.equal(loaded["weights"], torch.arange(16384.0)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stock_save(sys.argv[1])
    print(f"rank {dist.get_rank()} saved", flush=True)
