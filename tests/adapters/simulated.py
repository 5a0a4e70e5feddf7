"""What every rank of a large layout holds and writes: real models without weights, in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3VLConfig

from landfall.adapters.megatron_core import describe
from landfall.adapters.megatron_core.hugging_face import hugging_face_shards
from landfall.engine.columns import my_matrices
from landfall.engine.contents import Safetensors
from landfall.format.hf_folder import plan_export
from landfall.format.index import TensorRecord
from landfall.format.plan import my_share
from landfall.format.shards import Box, Shard
from landfall.format.torch_dist import dtype_name
from landfall.models.qwen3_vl import Qwen3VLNames, padded_vocab_size
from landfall.sft import cpu
from landfall.sft.model import build
from landfall.sft.model.qwen3_vl import Qwen3VLModel
from landfall.sft.model.vision import build_tower

BUCKET_ELEMENTS = 40_000_000


@dataclass(frozen=True)
class Sizes:
    tp: int
    pp: int
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def options(self) -> build.ModelOptions:
        return build.ModelOptions(
            bf16=True, tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp
        )


@dataclass(frozen=True)
class Part:
    """What one rank writes."""

    rank: int
    checkpoint: list[TensorRecord]
    export: list[TensorRecord]

    @property
    def num_bytes(self) -> int:
        sizes = {"bfloat16": 2, "float32": 4}
        return sum(
            record.box.num_elements * sizes[record.dtype.removeprefix("torch.")]
            for record in [*self.checkpoint, *self.export]
        )


def names_of(config: Qwen3VLConfig, sizes: Sizes) -> Qwen3VLNames:
    rows = padded_vocab_size(config.text_config.vocab_size, 128, sizes.tp)
    return Qwen3VLNames.from_config(config.to_dict(), vocab_rows=rows)


def parts(config: Qwen3VLConfig, sizes: Sizes) -> Iterator[Part]:
    """Of every rank."""
    names = names_of(config, sizes)
    plan = plan_export({name: ("BF16", shape) for name, shape in names.hf_shapes().items()})
    for stage in range(sizes.pp):
        for tp_rank in range(sizes.tp):
            first = stage * sizes.tp * sizes.dp + tp_rank
            description = describe_without_weights(config, sizes, first)
            held = hugging_face_shards(description, names.pieces, to_save=True)
            export = Safetensors(held, plan, description.replicas.tensor_groups)
            weights = describe.model_shards(description, to_save=True)
            loads = _loads(description, sizes)
            for dp_rank in range(sizes.dp):
                rank = first + dp_rank * sizes.tp
                shards = [*weights, *_optimizer(description, sizes, dp_rank, rank)]
                share = my_share(shards, rank, loads=loads)
                yield Part(rank, _records(share), _exported(export, rank))


def describe_without_weights(config: Qwen3VLConfig, sizes: Sizes, rank: int) -> describe.ModelDescription:
    """Of a rank of a world that is not there; the parameters have shapes and no memory."""
    cpu.install()
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        parallel_state.initialize_model_parallel(sizes.tp, sizes.pp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with FakeTensorMode():
            settings = build.transformer_config_from_hf(config, sizes.options)
            language_model = build._language_model(config, settings, sizes.options)
            first = parallel_state.is_pipeline_first_stage()
            tower = build_tower(config.vision_config, False) if first else None
            model = Qwen3VLModel(settings, language_model, tower, (1, 2), 2)
        return _without_memory(describe.describe_model(model))
    finally:
        torch.set_default_dtype(before)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _without_memory(description: describe.ModelDescription) -> describe.ModelDescription:
    """Meta tensors for fake ones, which are slow to slice."""
    parameters = []
    for described in description.parameters:
        fake = described.parameter
        meta = torch.empty(fake.shape, dtype=fake.dtype, device="meta")
        if getattr(fake, "shared_embedding", False):
            meta.shared_embedding = True  # type: ignore[attr-defined]
        parameters.append(describe.DescribedParameter(meta, described.pieces))
    return replace(description, parameters=parameters)


def _optimizer(
    description: describe.ModelDescription, sizes: Sizes, dp_rank: int, rank: int
) -> Iterator[Shard]:
    """Main parameters and moments of what a rank owns: an equal part of every bucket."""
    group = tuple(other + dp_rank * sizes.tp for other in description.replicas.tensor)
    for bucket in _buckets(description):
        share = -(-sum(described.parameter.numel() for described in bucket) // sizes.dp)
        begin, end, position = dp_rank * share, (dp_rank + 1) * share, 0
        for described in bucket:
            start, stop = max(begin - position, 0), min(end - position, described.parameter.numel())
            position += described.parameter.numel()
            if start < stop:
                yield from _states(described, start, stop, (rank,), group)


def _loads(description: describe.ModelDescription, sizes: Sizes) -> dict[int, int]:
    """As ``describe.optimizer_loads``, of these buckets."""
    loads = {}
    for dp_rank, rank in enumerate(description.replicas.data):
        shards = _optimizer(description, sizes, dp_rank, rank)
        loads[rank] = sum(shard.num_bytes // len(shard.replicas) for shard in shards)
    return loads


def _states(
    described: describe.DescribedParameter,
    start: int,
    stop: int,
    alone: tuple[int, ...],
    group: tuple[int, ...],
) -> Iterator[Shard]:
    flat = torch.empty(stop - start, dtype=torch.float32, device="meta")
    for name in describe.STATES:
        for piece in described.pieces:
            if piece.is_main:
                key = f"{describe.OPTIMIZER_PREFIX}.{name}.{piece.key}"
                replicas = alone if piece.is_split else group
                yield from describe._flat_shards(piece, key, flat, start, replicas)


def _buckets(description: describe.ModelDescription) -> Iterator[list[describe.DescribedParameter]]:
    """As megatron-core makes them with --overlap_grad_reduce: from the last parameter to the first, closed
    when they are full; a tied embedding has one of its own."""
    bucket: list[describe.DescribedParameter] = []
    num_elements = 0
    for described in reversed(description.parameters):
        if getattr(described.parameter, "shared_embedding", False):
            yield [described]
            continue
        bucket.append(described)
        num_elements += described.parameter.numel()
        if num_elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, num_elements = [], 0
    if bucket:
        yield bucket


def _exported(export: Safetensors, rank: int) -> list[TensorRecord]:
    records = _records(my_share(export.rows, rank, whole_tensors=True))
    group = next(group for group in export.groups if rank in group)
    if len(group) == 1:
        return records
    for matrix in my_matrices(export.columns, export.groups, rank):
        box = matrix.box(group.index(rank))
        records.append(_record(matrix.shard.key, matrix.shard, box))
    return records


def _records(shards: list[Shard]) -> list[TensorRecord]:
    return [_record(shard.key, shard, shard.box) for shard in shards if math.prod(shard.box.sizes)]


def _record(key: str, shard: Shard, box: Box) -> TensorRecord:
    return TensorRecord(key, dtype_name(shard.data.dtype), shard.global_shape, box, "", 0)
