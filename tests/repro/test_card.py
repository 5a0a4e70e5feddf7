"""The arithmetic of filling a card."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from landfall.repro.card import _next_chunk

MIB = 1 << 20
LEAST = 16 * MIB


@given(st.integers(0, 200 << 30))
def test_filling_ends_with_almost_nothing_left(room: int) -> None:
    count = 0
    while (size := _next_chunk(room, 4 << 30)) >= LEAST:
        assert size <= room and size % (2 * MIB) == 0
        room -= size
        count += 1
        assert count < 100
    assert room < LEAST if count == 0 else room < 2 * MIB
