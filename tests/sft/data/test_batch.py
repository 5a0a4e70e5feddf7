from __future__ import annotations

import torch

from landfall.sft.data.batch import NO_LOSS, Example, collate


def _example(start: int, length: int, num_images: int) -> Example:
    ids = torch.arange(start, start + length)
    return Example(
        input_ids=ids,
        labels=torch.where(ids % 2 == 0, ids, NO_LOSS),
        position_ids=ids.expand(3, -1),
        pixel_values=torch.full((4 * num_images, 6), float(start)) if num_images else None,
        grid_thw=torch.tensor([[1, 2, 2]] * num_images) if num_images else None,
        source="train.jsonl:1",
    )


def test_rows_are_joined_end_to_end_and_labels_shifted() -> None:
    batch = collate([_example(10, 4, 1), _example(20, 1, 0), _example(30, 3, 2)])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 30, 31, 32]
    assert batch.labels.tolist() == [NO_LOSS, 12, NO_LOSS, NO_LOSS, NO_LOSS, NO_LOSS, 32, NO_LOSS]
    assert batch.position_ids.tolist() == [batch.input_ids.tolist()] * 3
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.num_tokens, batch.num_rows) == (8, 3)
    assert batch.pixel_values is not None and batch.pixel_values[:, 0].tolist() == [10.0] * 4 + [30.0] * 8
    assert batch.grid_thw is not None and batch.grid_thw.tolist() == [[1, 2, 2]] * 3


def test_rows_without_images_have_no_pixels() -> None:
    batch = collate([_example(10, 4, 0), _example(20, 2, 0)])
    assert batch.pixel_values is None and batch.grid_thw is None


def test_batch_that_is_moved_holds_the_same() -> None:
    for batch in (collate([_example(10, 4, 1)]), collate([_example(10, 4, 0)])):
        moved = batch.to(torch.device("meta"))
        assert moved.input_ids.device.type == "meta"
        assert moved.cu_seqlens.dtype == torch.int32
        assert (moved.pixel_values is None) == (batch.pixel_values is None)
