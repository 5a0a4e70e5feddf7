from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from landfall.sft.data.positions import mrope_positions

PAD, START, END, MERGE = 9, 7, 8, 2


@pytest.fixture(scope="module")
def model() -> Qwen3VLModel:
    text = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=8)
    config = Qwen3VLConfig(
        text_config={**text, "num_key_value_heads": 1, "head_dim": 8},
        vision_config={**vision, "deepstack_visual_indexes": [0], "spatial_merge_size": MERGE},
        image_token_id=PAD,
    )
    with torch.device("meta"):
        return Qwen3VLModel(config)


def _row(grids: list[tuple[int, int, int]], gaps: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = [1] * gaps[0]
    for (t, h, w), gap in zip(grids, gaps[1:], strict=True):
        ids += [START] + [PAD] * (t * h * w // MERGE**2) + [END] + [1] * gap
    return np.array(ids, dtype=np.int64), np.array(grids, dtype=np.int64).reshape(-1, 3)


def _expected(model: Qwen3VLModel, ids: np.ndarray, grids: np.ndarray) -> list[list[int]]:
    tokens = torch.from_numpy(ids)[None]
    positions, _ = model.get_rope_index(
        tokens, (tokens == PAD).int(), image_grid_thw=torch.from_numpy(grids) if len(grids) else None
    )
    return positions[:, 0].tolist()


@pytest.mark.parametrize(
    ("grids", "gaps"),
    [
        ([], [5]),
        ([(1, 4, 6)], [3, 4]),
        ([(1, 2, 2), (1, 30, 40), (1, 8, 4)], [0, 0, 2, 1]),
    ],
    ids=["text", "one image", "several sizes"],
)
def test_positions_equal_those_of_transformers(
    model: Qwen3VLModel, grids: list[tuple[int, int, int]], gaps: list[int]
) -> None:
    ids, grid_thw = _row(grids, gaps)
    assert mrope_positions(ids, grid_thw, PAD, MERGE).tolist() == _expected(model, ids, grid_thw)


SIDE = st.integers(1, 5).map(lambda n: n * MERGE)


@given(grids=st.lists(st.tuples(st.integers(1, 3), SIDE, SIDE), max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_positions_of_any_row_equal_those_of_transformers(
    model: Qwen3VLModel, grids: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=len(grids) + 1, max_size=len(grids) + 1))
    ids, grid_thw = _row(grids, [gaps[0] + 1, *gaps[1:]])
    assert mrope_positions(ids, grid_thw, PAD, MERGE).tolist() == _expected(model, ids, grid_thw)


def test_grids_that_do_not_match_the_tokens_are_refused() -> None:
    ids, _ = _row([(1, 4, 4)], [1, 1])
    with pytest.raises(ValueError, match="4 image tokens for grids that make 6"):
        mrope_positions(ids, np.array([[1, 4, 6]]), PAD, MERGE)
