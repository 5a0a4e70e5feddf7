"""Overlong rows: an image is kept whole or goes with its pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.errors import DataError, UsageError
from landfall.sft.data.batch import NO_LOSS, Example
from landfall.sft.data.dataset import prepare
from landfall.sft.data.processor import Processor
from landfall.sft.data.truncate import keep, lengths
from tests.sft.data.conftest import chat

PAD, MARK = 9, 7


def _assert_images_are_whole(example: Example, processor: Processor) -> None:
    num_pads = int((example.input_ids == processor.image_token_id).sum())
    num_grid = 0 if example.grid_thw is None else int(example.grid_thw.prod(1).sum()) // 4
    assert num_pads == num_grid
    assert (example.pixel_values is None) == (num_pads == 0)


@pytest.fixture
def photo_rows(image: Callable[..., Path], jsonl: Callable[..., str]) -> str:
    """A fitting row, a 300-token photo with a question and its answer, a fitting row."""
    image("photo.png", 640, 480)
    return jsonl(
        [chat("hi", "ho"), chat("<image>what is this?", "a cat", images=["photo.png"]), chat("ha", "he")]
    )


@pytest.mark.case("f01")
def test_overlong_row_is_deleted_counted_and_named(
    photo_rows: str, config: Callable[..., Any], processor: Processor
) -> None:
    prepared = prepare(config(photo_rows, max_length=256), processor)
    assert [prepared.train.source(i) for i in range(len(prepared.train))] == [
        f"{photo_rows}:1",
        f"{photo_rows}:3",
    ]
    (deleted,) = prepared.report.deleted
    assert deleted.source == f"{photo_rows}:2"
    assert deleted.reason == "317 tokens, max_length 256"
    assert "1 overlong rows left out" in "\n".join(prepared.report.lines())


@pytest.mark.case("f01")
def test_overlong_row_is_refused_with_line_and_both_lengths(
    photo_rows: str, config: Callable[..., Any], processor: Processor
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(config(photo_rows, max_length=256, truncation_strategy="raise"), processor)
    assert f"{photo_rows}:2: 317 tokens, max_length 256" in str(caught.value)


@pytest.mark.case("f01")
def test_photo_that_does_not_fit_goes_whole_when_the_left_is_cut_off(
    photo_rows: str, config: Callable[..., Any], processor: Processor
) -> None:
    prepared = prepare(config(photo_rows, max_length=256, truncation_strategy="left"), processor)
    assert len(prepared.train) == 3
    example = prepared.train[1]
    _assert_images_are_whole(example, processor)
    assert example.pixel_values is None
    text = processor.tokenizer.decode(example.input_ids)
    assert text == "what is this?<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>"
    assert "1 of 1 images cut off" in prepared.report.cut[0].reason


@pytest.mark.case("f01")
def test_nothing_is_left_to_train_on_when_the_right_of_a_photo_is_cut_off(
    photo_rows: str, config: Callable[..., Any], processor: Processor
) -> None:
    prepared = prepare(config(photo_rows, max_length=256, truncation_strategy="right"), processor)
    assert len(prepared.train) == 2
    assert "nothing to train on is left" in prepared.report.deleted[0].reason


@pytest.mark.case("f01")
@pytest.mark.parametrize("strategy", ["delete", "raise", "left", "right"])
def test_row_of_just_max_length_always_trains(
    photo_rows: str, config: Callable[..., Any], processor: Processor, strategy: str
) -> None:
    prepared = prepare(config(photo_rows, max_length=317, truncation_strategy=strategy), processor)
    assert len(prepared.train) == 3
    example = prepared.train[1]
    _assert_images_are_whole(example, processor)
    assert int((example.input_ids == processor.image_token_id).sum()) == 300
    assert not prepared.report.deleted and not prepared.report.cut


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_every_max_length_leaves_images_whole(
    image: Callable[..., Path],
    jsonl: Callable[..., str],
    config: Callable[..., Any],
    processor: Processor,
    strategy: str,
) -> None:
    image("a.png", 64, 64), image("b.png", 128, 64)
    row = chat("<image>one<image>two", "yes<image>no", images=["a.png", "b.png", "a.png"])
    data, seen = jsonl([row, chat("", "")]), set()
    for max_length in range(9, 43):
        prepared = prepare(config(data, max_length=max_length, truncation_strategy=strategy), processor)
        for index in range(len(prepared.train)):
            example = prepared.train[index]
            _assert_images_are_whole(example, processor)
            assert example.input_ids.numel() == prepared.train.lengths[index] <= max_length
            assert (example.labels[1:] != NO_LOSS).any()
            seen.add(0 if example.grid_thw is None else len(example.grid_thw))
    assert seen == {"left": {0, 1, 2, 3}, "right": {0, 2, 3}}[strategy]


def test_row_of_which_only_the_first_token_is_trained_on_counts_as_deleted(
    jsonl: Callable[..., str], config: Callable[..., Any], processor: Processor
) -> None:
    data = jsonl([chat("hi", "ho")])
    with pytest.raises(DataError, match="No row is left") as caught:
        prepare(config(data, max_length=1, truncation_strategy="left"), processor)
    assert "nothing to train on is left" in str(caught.value)
    assert len(prepare(config(data, max_length=2, truncation_strategy="left"), processor).train) == 1


def test_split_is_refused_by_name(config: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="split is not supported"):
        config("train.jsonl", truncation_strategy="split")


@given(
    row=st.lists(st.one_of(st.just(0), st.integers(1, 40)), max_size=12),
    max_length=st.integers(0, 120),
    strategy=st.sampled_from(["left", "right"]),
)
@settings(deadline=None)
def test_cut_never_parts_an_image_and_never_wastes_room(
    row: list[int], max_length: int, strategy: str
) -> None:
    """``row``: 0 is a text token, n > 0 an image of n tokens between its marks."""
    ids = [token for n in row for token in ([MARK, PAD, MARK] if n else [1])]
    each = lengths(ids, PAD, [n for n in row if n])
    pads = np.flatnonzero(np.array(ids) == PAD)
    kept = keep(each, pads, max_length, strategy)

    units = [n + 2 if n else 1 for n in row]
    units = units[::-1] if strategy == "left" else units
    expected = 0
    for unit in units:
        if expected + unit > max_length:
            break
        expected += unit
    assert each[kept].sum() == expected
    assert kept.start == 0 if strategy == "right" else kept.stop == len(ids)
    for pad in pads:
        inside = [kept.start <= place < kept.stop for place in (pad - 1, pad, pad + 1)]
        assert all(inside) or not any(inside)
