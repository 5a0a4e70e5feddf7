"""Random models and layouts: description -> boxes -> files -> another layout is the identity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.adapters.megatron_core import describe
from landfall.adapters.megatron_core.describe import Piece
from landfall.adapters.megatron_core.vocabulary import fit_padding
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.format import plan, torch_dist
from landfall.format.shards import Shard
from landfall.store.memory import MemoryStore

VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Kind:
    """A parameter of every layer, or with ``num_layers`` 0 one of the first stage."""

    name: str
    split: str
    """rows, gated (two halves by rows), columns, whole"""
    num_layers: int
    rows: int
    columns: int

    def shape(self, layout: Layout) -> tuple[int, ...]:
        rows = self.rows
        if self.name == VOCABULARY:
            multiple = 4 * layout.tp
            rows = -(-rows // multiple) * multiple
        return (*([self.num_layers] if self.num_layers else []), rows, self.columns)


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    dp: int
    cuts: tuple[float, ...]
    """Where data-parallel ranks divide a flat parameter: dp - 1 shares of it, rising."""


@dataclass(frozen=True)
class Rank:
    layout: Layout
    t: int
    p: int
    d: int

    @property
    def number(self) -> int:
        return self.t + self.layout.tp * (self.d + self.layout.dp * self.p)

    @property
    def data(self) -> tuple[int, ...]:
        return tuple(replace(self, d=d).number for d in range(self.layout.dp))

    @property
    def tensor(self) -> tuple[int, ...]:
        return tuple(replace(self, t=t).number for t in range(self.layout.tp))

    @property
    def stage(self) -> tuple[int, ...]:
        ranks = (replace(self, t=t, d=d) for t in range(self.layout.tp) for d in range(self.layout.dp))
        return tuple(sorted(rank.number for rank in ranks))


def ranks_of(layout: Layout) -> Iterator[Rank]:
    for p in range(layout.pp):
        for d in range(layout.dp):
            for t in range(layout.tp):
                yield Rank(layout, t, p, d)


def local_parts(kind: Kind, rank: Rank) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that one local parameter consists of, in a layer."""
    rows, columns = kind.shape(rank.layout)[-2:]
    tp, t = rank.layout.tp, rank.t
    if kind.split == "rows":
        return [((rows // tp * t, 0), (rows // tp, columns))]
    if kind.split == "gated":
        half = rows // 2
        return [((first + half // tp * t, 0), (half // tp, columns)) for first in (0, half)]
    if kind.split == "columns":
        return [((0, columns // tp * t), (rows, columns // tp))]
    return [((0, 0), (rows, columns))]


def pieces_of(kind: Kind, rank: Rank, layer: int) -> tuple[Piece, ...]:
    stacked = kind.num_layers > 0
    pieces, start = [], 0
    for offsets, sizes in local_parts(kind, rank):
        pieces.append(
            Piece(
                key=kind.name,
                global_shape=kind.shape(rank.layout),
                offsets=((layer,) if stacked else ()) + offsets,
                shape=((1,) if stacked else ()) + sizes,
                start=start,
                num_stacked=int(stacked),
                is_split=kind.split != "whole",
                is_main=True,
                is_padded=kind.name == VOCABULARY,
            )
        )
        start += math.prod(sizes)
    return tuple(pieces)


def shards_of(kinds: list[Kind], rank: Rank) -> list[Shard]:
    """Weights and one optimizer state, all zero: what a rank would load into."""
    shards: list[Shard] = []
    for kind in kinds:
        if kind.num_layers:
            share = kind.num_layers // rank.layout.pp
            layers = range(rank.p * share, (rank.p + 1) * share)
        else:
            layers = range(1 if rank.p == 0 else 0)
        for layer in layers:
            pieces = pieces_of(kind, rank, layer)
            parameter = torch.zeros(sum(math.prod(piece.shape) for piece in pieces))
            bounds = [0, *(int(cut * parameter.numel()) for cut in rank.layout.cuts), parameter.numel()]
            begin, end = bounds[rank.d], bounds[rank.d + 1]
            flat = torch.zeros(end - begin)
            for piece in pieces:
                replicas = rank.data if piece.is_split else rank.stage
                shards.append(describe._shard(piece, parameter, replicas))
                owners = (rank.number,) if piece.is_split else rank.tensor
                shards.extend(describe._flat_shards(piece, f"moment.{kind.name}", flat, begin, owners))
    return shards


def expected(shard: Shard, seed: int) -> torch.Tensor:
    """What lies at a place depends on key and place alone; padding is zero."""
    numbers = torch.zeros(shard.box.sizes)
    for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
        along = torch.arange(offset, offset + size) * 31**dim
        numbers += along.reshape([-1 if other == dim else 1 for other in range(len(shard.box.sizes))])
    return numbers + seed + len(shard.key)


def filled(shard: Shard, kinds: list[Kind], seed: int) -> torch.Tensor:
    values = expected(shard, seed)
    if shard.key.endswith(VOCABULARY):
        vocab = next(kind.rows for kind in kinds if kind.name == VOCABULARY)
        values[max(vocab - shard.box.offsets[0], 0) :] = 0
    return values


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp = draw(st.integers(1, 4))
    cuts = tuple(sorted(draw(st.lists(st.floats(0, 1), min_size=dp - 1, max_size=dp - 1))))
    return Layout(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), dp, cuts)


@st.composite
def models(draw: st.DrawFn) -> list[Kind]:
    kinds = [
        Kind(
            f"layers.{split}.{number}",
            split,
            draw(st.sampled_from([0, 2, 4])),
            8 * draw(st.integers(1, 3)),
            4 * draw(st.integers(1, 4)),
        )
        for number, split in enumerate(
            draw(st.lists(st.sampled_from(["rows", "gated", "columns", "whole"]), max_size=4))
        )
    ]
    return [*kinds, Kind(VOCABULARY, "rows", 0, draw(st.integers(1, 40)), draw(st.integers(1, 5)))]


@settings(max_examples=60, deadline=None)
@given(models(), layouts(), layouts(), st.integers(0, 1000))
def test_what_any_layout_saves_any_other_loads(
    kinds: list[Kind], source: Layout, target: Layout, seed: int
) -> None:
    store, shares = MemoryStore(), []
    for rank in ranks_of(source):
        held = shards_of(kinds, rank)
        for shard in held:
            shard.data.copy_(filled(shard, kinds, seed))
        loads = {number: 300 * number for number in rank.data}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "SMALLEST_PART_BYTES", 64)
            share = plan.my_share(held, rank.number, loads=loads)
        shares += [replace(shard, replicas=(0,)) for shard in share]
    save(Contents(TorchDist(shares, [], torch_dist.object_bytes({}))), store, solo_session(), step=1)

    checkpoint = Checkpoint(store)
    vocab = next(kind.rows for kind in kinds if kind.name == VOCABULARY)
    padded = {VOCABULARY, f"moment.{VOCABULARY}"}
    for rank in ranks_of(target):
        wanted = shards_of(kinds, rank)
        load(fit_padding(wanted, checkpoint, TORCH_DIST, padded, vocab), checkpoint, TORCH_DIST)
        for shard in wanted:
            assert torch.equal(shard.data, filled(shard, kinds, seed)), (shard.key, shard.box)
