"""Whether a model can be shared out as the flags say: checked before any rank builds its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from landfall.errors import UsageError
from landfall.sft.flags.table import SftConfig


def check_layout(config: SftConfig, model_config: Mapping[str, Any]) -> None:
    """Raise UsageError with the numbers and the nearest sizes that fit. ``model_config`` is config.json."""
    text, vision = model_config["text_config"], model_config["vision_config"]
    _check_tensor_parallel(config.tensor_model_parallel_size, text)
    num_levels = len(vision["deepstack_visual_indexes"])
    _check_pipeline(config.pipeline_model_parallel_size, text["num_hidden_layers"], num_levels)


def _check_tensor_parallel(size: int, text: Mapping[str, Any]) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: int(text[name]) for name in names}
    common = math.gcd(*sizes.values())
    if common % size:
        wrong = [f"{name} {value}" for name, value in sizes.items() if value % size]
        raise UsageError(
            "--tensor_model_parallel_size does not divide the model",
            got=f"{size}, with {' and '.join(wrong)} in config.json",
            expected=f"a divisor of {', '.join(map(str, sizes.values()))}",
            do=_nearest(size, lambda other: common % other == 0, common),
        )


def _check_pipeline(size: int, num_layers: int, num_levels: int) -> None:
    def fits(other: int) -> bool:
        return num_layers % other == 0 and (other == 1 or num_layers // other >= num_levels)

    if num_layers % size:
        raise UsageError(
            "--pipeline_model_parallel_size does not divide the layers",
            got=f"{size}, with num_hidden_layers {num_layers} in config.json",
            expected="the same number of layers on every stage",
            do=_nearest(size, fits, num_layers),
        )
    if not fits(size):
        raise UsageError(
            "the first pipeline stage has too few layers for the vision tower's deepstack features",
            got=f"--pipeline_model_parallel_size {size}, so {num_layers // size} of {num_layers} layers",
            expected=f"at least {num_levels}: the features of {num_levels} levels are added after its layers",
            do=_nearest(size, fits, num_layers),
        )


def _nearest(size: int, fits: Callable[[int], bool], most: int) -> str:
    """The sizes next to ``size`` that fit, of 1 to ``most``."""
    below = next((other for other in range(min(size - 1, most), 0, -1) if fits(other)), None)
    above = next((other for other in range(size + 1, most + 1) if fits(other)), None)
    found = [str(other) for other in (below, above) if other is not None]
    return f"the nearest are {' and '.join(found)}" if len(found) > 1 else f"the nearest is {found[0]}"
