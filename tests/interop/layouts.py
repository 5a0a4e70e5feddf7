"""One training in every parallel layout: what each rank does to save it, to load it, and to compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from landfall.adapters.megatron_core import buckets, describe
from landfall.adapters.megatron_core.hugging_face import hugging_face_shards
from landfall.adapters.megatron_core.vocabulary import clear_padding, fit_padding
from landfall.engine.checkpoint import Checkpoint, Source
from landfall.engine.contents import TORCH_DIST, Contents, Safetensors, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.stock import StockCheckpoint
from landfall.format import torch_dist
from landfall.format.hf_folder import plan_export
from landfall.format.shards import Shard
from landfall.format.unpickle import load_object
from landfall.models.qwen3_vl import Qwen3VLNames, padded_vocab_size
from landfall.sft.model.build import ModelOptions
from landfall.store.local import LocalStore
from tests.interop import job as jobs
from tests.sft.model import tiny

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
MAX_SHARD_SIZE = "100KB"
STEPS = 3
"""Before the save."""


@dataclass(frozen=True)
class Layout:
    name: str
    num_ranks: int
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> ModelOptions:
        return replace(ModelOptions(), **dict(self.sizes))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("1", 1),
        Layout("DP2", 2),
        Layout("DP4", 4),
        Layout("TP2", 2, ((TP, 2),)),
        Layout("TP2+SP", 2, ((TP, 2), ("sequence_parallel", True))),
        Layout("PP2", 2, ((PP, 2),)),
        Layout("CP2", 2, ((CP, 2),)),
        Layout("TP2xPP2", 4, ((TP, 2), (PP, 2))),
        Layout("TP2xDP2", 4, ((TP, 2),)),
        Layout("PP2xDP2", 4, ((PP, 2),)),
        Layout("CP2xTP2+SP", 4, ((CP, 2), (TP, 2), ("sequence_parallel", True))),
    )
}


@dataclass(frozen=True)
class Saved:
    """What one rank knows of its save."""

    boxes: list[tuple[str, tuple[int, ...], tuple[slice, ...], torch.Tensor]]
    """key, global shape, where, and what was there: of the model and of the optimizer."""
    next_losses: list[float]


@dataclass(frozen=True)
class Found:
    """What one rank found after loading."""

    different: list[str]
    """Tensors that are not bit for bit what was saved."""
    next_losses: list[float]
    num_bytes_read: int
    num_bytes_touched: int


def names(tied: bool, layout: Layout) -> Qwen3VLNames:
    options = layout.options
    rows = padded_vocab_size(
        tiny.VOCAB, options.make_vocab_size_divisible_by, options.tensor_model_parallel_size
    )
    return Qwen3VLNames.from_config(tiny.config(tied).to_dict(), vocab_rows=rows)


def train_and_save(layout: Layout, folder: str, tied: bool) -> Saved:
    """On every rank of ``layout``: a few steps, a save, what was saved, and the losses of the next steps."""
    job = jobs.start(bf16=False, tied=tied, options=layout.options)
    job.train(0, STEPS)
    save_all(job, Path(folder), names(tied, layout))
    saved = Saved(boxes(job), job.train(STEPS, STEPS + 2))
    job.session.coordinator.close()
    return saved


def save_all(job: jobs.Job, folder: Path, table: Qwen3VLNames) -> None:
    """Model, optimizer and the weights as Hugging Face's files."""
    description = describe.describe_model(job.model)
    shards = describe.model_shards(description, to_save=True)
    shards += describe.optimizer_shards(job.optimizer, description, to_save=True)
    common = {
        "iteration": STEPS,
        "content_metadata": describe.METADATA,
        "optimizer": describe.optimizer_common(job.optimizer),
        "opt_param_scheduler": job.scheduler.state_dict(),
    }
    export = Safetensors(
        hugging_face_shards(description, table.pieces, to_save=True),
        plan_export({name: ("F32", shape) for name, shape in table.hf_shapes().items()}, MAX_SHARD_SIZE),
        description.replicas.tensor_groups,
    )
    loads = describe.optimizer_loads(job.optimizer, description)
    part = TorchDist(shards, description.objects, torch_dist.object_bytes(common), loads=loads)
    save(Contents(part, export), LocalStore(folder), job.session, step=STEPS)


def everything(job: jobs.Job) -> list[Shard]:
    description = describe.describe_model(job.model)
    return [
        *describe.model_shards(description, to_save=False),
        *describe.optimizer_shards(job.optimizer, description, to_save=False),
    ]


def boxes(job: jobs.Job) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], torch.Tensor]]:
    return [
        (shard.key, shard.global_shape, _where(shard), shard.data.detach().clone())
        for shard in everything(job)
    ]


def put_together(ranks: list[Saved]) -> dict[str, torch.Tensor]:
    """Whole tensors of what all ranks hold. Two ranks that hold the same element must agree on its bits."""
    wholes: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for saved in ranks:
        for key, shape, where, data in saved.boxes:
            whole = wholes.setdefault(key, torch.zeros(shape))
            known = held.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            again = known[where]
            assert torch.equal(whole[where][again], data[again]), f"{key}: replicas differ"
            whole[where], known[where] = data, True
    missing = [key for key, known in held.items() if not known.all()]
    assert not missing, missing
    return wholes


def load_each(layout: Layout, folders: dict[str, str], tied: bool, export: str = "") -> dict[str, Found]:
    """On every rank of ``layout``: load each folder, compare with its state.pt, and train on.

    What was loaded from the first of them is exported to ``export``.
    """
    job = jobs.start(bf16=False, seed=4, tied=tied, options=layout.options)
    found = {}
    for name, folder in folders.items():
        num_read, num_touched = load_any(job, Checkpoint(LocalStore(folder)))
        different = _compare(job, torch.load(Path(folder, "state.pt")))
        if export and not found:
            save_all(job, Path(export), names(tied, layout))
        found[name] = Found(different, job.train(STEPS, STEPS + 1), num_read, num_touched)
    job.session.coordinator.close()
    return found


def load_any(job: jobs.Job, source: Source) -> tuple[int, int]:
    """Load whatever layout saved it; bytes read, and bytes of the chunks that hold something wanted."""
    description = describe.describe_model(job.model)
    clear_padding(description, tiny.VOCAB)
    stock = isinstance(source, StockCheckpoint)
    data = source.read_common() if stock else source.read_file(torch_dist.COMMON)  # type: ignore
    common = load_object(data, source.place)
    in_buckets = common["optimizer"].get("param_state_sharding_type") == buckets.KIND
    shards = describe.model_shards(description, to_save=False) if in_buckets else everything(job)
    wanted = fit_padding(shards, source, TORCH_DIST, description.padded_keys, tiny.VOCAB)
    report = load(wanted, source, TORCH_DIST)
    if in_buckets:
        buckets.load_buckets(job.optimizer, source)
    groups = buckets.read_groups(job.optimizer, source) if in_buckets else common["optimizer"]  # type: ignore
    describe.restore_optimizer_common(job.optimizer, groups)
    job.scheduler.load_state_dict(common["opt_param_scheduler"])
    return report.num_bytes_read, _touched(wanted, source)


def _touched(wanted: list[Shard], source: Source) -> int:
    records = source.tensors(TORCH_DIST, {shard.key for shard in wanted})
    chunks = set()
    for shard in wanted:
        for record in records[shard.key]:
            if record.box.intersect(shard.box) is not None:
                end = record.offset + record.box.num_elements * shard.data.element_size()
                offset = record.offset
                while offset < end:
                    chunk = source.chunk_of(record.file, offset)
                    chunks.add((chunk.file, chunk.offset, chunk.length))
                    offset = chunk.offset + chunk.length
    return sum(length for _, _, length in chunks)


def _compare(job: jobs.Job, state: dict[str, torch.Tensor]) -> list[str]:
    different = []
    for shard in everything(job):
        whole = state[shard.key]
        if "word_embeddings" in shard.key or "output_layer" in shard.key:
            padded = torch.zeros(shard.global_shape)
            padded[: tiny.VOCAB] = whole[: tiny.VOCAB]
            whole = padded
        if not torch.equal(shard.data, whole[_where(shard)]):
            different.append(f"{shard.key}@{shard.box}")
    return different


def _where(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(shard.box.offsets, shard.box.sizes, strict=True))


def exported_files(folder: str | Path) -> dict[str, str]:
    """Name -> digest of the weights and their index."""
    found = sorted(Path(folder).glob("model*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def stock_loads(layout: Layout, folder: str, tied: bool) -> list[str]:
    """On every rank of ``layout``: stock megatron-core loads what we saved; what differs from state.pt."""
    job = jobs.start(bf16=False, seed=4, tied=tied, options=layout.options)
    jobs.load_stock(job, Path(folder))
    different = _compare(job, torch.load(Path(folder, "state.pt")))
    job.session.coordinator.close()
    return different


def stock_saves(layout: Layout, folder: str, tied: bool, kind: str) -> list[str]:
    """On every rank of ``layout``: stock megatron-core saves, we load; what differs from before."""
    job = jobs.start(bf16=False, tied=tied, options=layout.options)
    job.train(0, STEPS)
    before = boxes(job)
    jobs.save_stock(job, Path(folder), kind)
    dist.barrier()
    job.train(STEPS, STEPS + 1)
    load_any(job, StockCheckpoint(LocalStore(folder)))
    pairs = zip(before, boxes(job), strict=True)
    different = [key for (key, *_, data), (*_, found) in pairs if not torch.equal(data, found)]
    job.session.coordinator.close()
    return different


def stock_trains(layout: Layout, folder: str) -> Saved:
    """On every rank of ``layout``: train, and let stock megatron-core save the buckets as they lie."""
    job = jobs.start(bf16=False, options=layout.options)
    job.train(0, STEPS)
    jobs.save_stock(job, Path(folder), buckets.KIND)
    job.session.coordinator.close()
    return Saved(boxes(job), [])


def load_stock_state(layout: Layout, folder: str) -> list[str]:
    """On every rank of ``layout``: we load what stock megatron-core saved; what differs from state.pt."""
    job = jobs.start(bf16=False, seed=4, options=layout.options)
    load_any(job, StockCheckpoint(LocalStore(folder)))
    job.session.coordinator.close()
    return _compare(job, torch.load(Path(folder, "state.pt")))
