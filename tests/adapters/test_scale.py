"""Published models in large layouts, by simulation: nothing missing, nothing twice, nobody writes most."""

from __future__ import annotations

import pytest

from landfall.format.cover import find_faults
from landfall.models.qwen3_vl import Qwen3VLNames
from tests.adapters.simulated import Part, Sizes, names_of, parts
from tests.models.test_qwen3_vl import PUBLISHED, published, saved_shapes


def assert_whole(found: list[Part], names: Qwen3VLNames) -> None:
    checkpoint = [record for part in found for record in part.checkpoint]
    export = [record for part in found for record in part.export]
    assert find_faults(checkpoint) == [] and find_faults(export) == []
    assert {record.key: record.global_shape for record in export} == names.hf_shapes()
    model = {record.key for record in checkpoint if not record.key.startswith("optimizer.")}
    optimizer = {record.key for record in checkpoint} - model
    assert optimizer == {
        f"optimizer.state.{s}.{key}" for s in ("param", "exp_avg", "exp_avg_sq") for key in model
    }


@pytest.mark.slow
def test_4b_model_on_128_ranks_is_whole_and_every_rank_writes_as_much() -> None:
    sizes, config = Sizes(tp=8, pp=2, dp=8), published("4B")
    found = list(parts(config, sizes))
    assert sorted(part.rank for part in found) == list(range(128))
    assert_whole(found, names_of(config, sizes))
    num_bytes = [part.num_bytes for part in found]
    mean = sum(num_bytes) / len(num_bytes)
    assert max(num_bytes) < 1.05 * mean and min(num_bytes) > 0.95 * mean, (
        min(num_bytes),
        max(num_bytes),
        mean,
    )


def layouts(name: str) -> list[Sizes]:
    hidden, layers, ffn, heads, tied, vision = PUBLISHED[name]
    tps = [tp for tp in (1, 2, 4, 8) if ffn % tp == 0 and heads % tp == 0]
    pps = [pp for pp in (1, 2, 4, 7, 8, 12) if layers % pp == 0 and layers // pp >= 3]
    return [Sizes(tp, pp) for tp in tps for pp in pps]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_every_name_and_shape_in_every_layout(name: str) -> None:
    config = published(name)
    for sizes in layouts(name):
        names = names_of(config, sizes)
        assert_whole(list(parts(config, sizes)), names)
    assert names.hf_shapes() == saved_shapes(config)


def test_tied_embedding_of_two_stages_is_written_once() -> None:
    config, sizes = published("2B"), Sizes(tp=2, pp=2)
    assert_whole(list(parts(config, sizes)), names_of(config, sizes))
