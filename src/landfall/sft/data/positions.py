"""Qwen3-VL's three-dimensional positions. T tokens, n images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mrope_positions(
    input_ids: NDArray[np.int64], grid_thw: NDArray[np.int64], image_token_id: int, merge_size: int
) -> NDArray[np.int64]:
    """The positions [3, T] (time, height, width) of ``input_ids`` [T], image tokens expanded.

    A text token moves all three on by one. An image's tokens share the position that it starts at, plus
    their place in its merged grid; the image as a whole moves all three on by its longer side.
    ``grid_thw`` [n, 3] counts patches, ``merge_size`` squared of which become one token.
    """
    is_image = input_ids == image_token_id
    (places,) = np.nonzero(is_image)
    time, height, width = (grid_thw // [1, merge_size, merge_size]).T
    num_tokens = time * height * width
    ends = np.cumsum(num_tokens)
    if places.size != num_tokens.sum():
        raise ValueError(f"{places.size} image tokens for grids that make {num_tokens.sum()}")

    moves_on = np.where(is_image, 0, 1)
    moves_on[places[ends - 1]] = np.maximum(height, width)
    positions = np.tile(np.cumsum(moves_on) - moves_on, (3, 1))

    rank = np.arange(places.size) - np.repeat(ends - num_tokens, num_tokens)
    rows, columns = np.repeat(height, num_tokens), np.repeat(width, num_tokens)
    positions[:, places] += np.stack([rank // (rows * columns), rank // columns % rows, rank % columns])
    return positions
