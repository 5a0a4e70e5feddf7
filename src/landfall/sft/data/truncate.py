"""Cutting an overlong row without cutting an image. K tokens; an image is one pad between its two marks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from landfall.errors import UsageError

STRATEGIES = ("delete", "raise", "left", "right")


def check_strategy(strategy: str) -> None:
    """Raises UsageError unless ``strategy`` is one of STRATEGIES."""
    if strategy in STRATEGIES:
        return
    why = "it would train on the second half of an answer without its question" if strategy == "split" else ""
    raise UsageError(
        f"truncation_strategy {strategy} is not supported" + (f": {why}" if why else ""),
        expected=", ".join(STRATEGIES),
        do="delete drops overlong rows and reports them; left and right shorten them; raise refuses them",
    )


def lengths(input_ids: Sequence[int], image_token_id: int, image_tokens: Sequence[int]) -> NDArray[np.int64]:
    """How many tokens each of ``input_ids`` [K] becomes: a pad as many as its image, others one."""
    each = np.ones(len(input_ids), dtype=np.int64)
    each[np.asarray(input_ids) == image_token_id] = image_tokens
    return each


def keep(each: NDArray[np.int64], pads: NDArray[np.int64], max_length: int, strategy: str) -> slice:
    """The longest slice of a row, from its start (``right`` is cut) or up to its end (``left`` is cut), that
    becomes at most ``max_length`` tokens and holds every image whole, marks included, or not at all.

    ``each`` [K] are the row's ``lengths``; ``pads`` the places of its images, each between two marks.
    """
    if strategy == "left":
        mirrored = keep(each[::-1], len(each) - 1 - pads[::-1], max_length, "right")
        return slice(len(each) - mirrored.stop, len(each))
    end = int(np.searchsorted(np.cumsum(each), max_length, side="right"))
    cut = pads[(pads - 1 < end) & (end <= pads + 1)]
    return slice(0, int(cut[0]) - 1 if cut.size else end)
