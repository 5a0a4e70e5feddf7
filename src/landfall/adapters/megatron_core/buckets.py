"""The optimizer as stock megatron-core saves it by default: ``dp_reshardable``, the flat buckets as they lie.

Which parameter lies where in a bucket is not written down: it follows from the layout and the options of the
run that saved it. So it can be read by another number of data-parallel ranks, as long as the buckets hold the
same, and by no other tensor- or pipeline-parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from landfall.adapters.megatron_core.describe import STATES, distributed_optimizers
from landfall.engine.checkpoint import Source
from landfall.engine.contents import TORCH_DIST
from landfall.engine.load import load
from landfall.engine.stock import StockCheckpoint
from landfall.errors import CheckpointError, DamagedError
from landfall.format.shards import Box, Shard
from landfall.format.unpickle import load_object

KIND = "dp_reshardable"


def load_buckets(optimizer: Any, source: Source) -> None:
    """Fill this rank's main parameters and moments. CheckpointError if the buckets are not those of here."""
    shards = [shard for inner in distributed_optimizers(optimizer) for shard in _bucket_shards(inner)]
    try:
        load(shards, source, TORCH_DIST)
    except DamagedError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"The optimizer was saved as {KIND} in another layout, from which it can't be read",
            where=error.where or source.place,
            got=error.got or error.what,
            expected=error.expected or "the flat buckets of this layout",
            do="load it with the tensor- and pipeline-parallel sizes with which it was saved; or save it there "
            "as fully_reshardable (--dist_ckpt_optim_fully_reshardable in Megatron); or go on without it "
            "(--no_load_optim true)",
        ) from error


def read_groups(optimizer: Any, source: StockCheckpoint) -> dict[str, Any]:
    """What :func:`restore_optimizer_common` takes; every tensor- and pipeline-parallel position has
    its own. Call it after :func:`load_buckets`."""
    (inner,) = distributed_optimizers(optimizer)
    key = f"optimizer.distributed.dp_group_idx_{inner.data_parallel_group_idx}.optimizer/shard_0_1"
    record = source.objects(TORCH_DIST).get(key)
    if record is None:
        raise CheckpointError("The optimizer's groups are missing", where=source.place, expected=key)
    saved = load_object(source.read_object(record), source.place)
    while isinstance(saved, list):
        saved = saved[0]
    return {"optimizer": saved}


def _bucket_shards(optimizer: DistributedOptimizer) -> Iterator[Shard]:
    rank = optimizer.data_parallel_group.rank()
    size = optimizer.data_parallel_group.size()
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        for dtype, buckets in ranges.items():
            for index, bucket in enumerate(buckets):
                buffer = optimizer.buffers[number].buckets[index]
                first = rank * (buffer.grad_data.numel() // size)
                key = (
                    f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
                    f".gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{index}"
                )
                for parameter, where in bucket["param_map"].items():
                    state = optimizer._get_main_param_and_optimizer_states(parameter)
                    box = Box((first + where["gbuf_local"].start,), (where["gbuf_local"].size,))
                    for name in STATES:
                        flat = state[name].detach().view(-1)
                        yield Shard(f"{key}.{name}", (buffer.numel_unpadded,), box, flat, ())
