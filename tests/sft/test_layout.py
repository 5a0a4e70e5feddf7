"""Layouts that a model can't be shared out to are refused before anything is built, with what would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from landfall.errors import UsageError
from landfall.sft.config import SftConfig
from landfall.sft.layout import check_layout

LARGE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
}
"""Qwen3-VL-4B's."""


def check(text: dict[str, int] = LARGE, num_levels: int = 3, **sizes: int) -> None:
    model_config: dict[str, Any] = {
        "text_config": text,
        "vision_config": {"deepstack_visual_indexes": list(range(num_levels))},
    }
    check_layout(replace(SftConfig(), **sizes), model_config)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 12},
        {"pipeline_model_parallel_size": 1},
    ],
)
def test_layout_that_divides_the_model_passes(sizes: dict[str, int]) -> None:
    check(**sizes)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor_model_parallel_size": 3}, ("3, with num_attention_heads 32", "nearest are 2 and 4")),
        ({"tensor_model_parallel_size": 16}, ("16, with num_key_value_heads 8 in", "nearest is 8")),
        ({"pipeline_model_parallel_size": 5}, ("5, with num_hidden_layers 36", "nearest are 4 and 6")),
        ({"pipeline_model_parallel_size": 100}, ("100, with num_hidden_layers 36", "nearest is 12")),
        ({"pipeline_model_parallel_size": 18}, ("2 of 36 layers", "at least 3", "nearest is 12")),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused_with_the_nearest(
    sizes: dict[str, int], told: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as error:
        check(**sizes)
    assert all(part in str(error.value) for part in told), str(error.value)
