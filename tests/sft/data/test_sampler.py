from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from landfall.errors import UsageError
from landfall.sft.data.sampler import Stream, check_batch_sizes, epoch_rows, train_iters


@given(
    num_rows=st.integers(1, 60),
    micro_batch_size=st.integers(1, 4),
    dp_size=st.integers(1, 4),
    num_micro_batches=st.integers(1, 4),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None)
def test_any_number_of_ranks_trains_on_the_same_global_batches(
    num_rows: int, micro_batch_size: int, dp_size: int, num_micro_batches: int, seed: int
) -> None:
    global_batch_size = micro_batch_size * dp_size * num_micro_batches
    stream = Stream(num_rows, num_rows, global_batch_size, seed)
    for step in range(3):
        shards = [stream.shard(step, rank, dp_size, micro_batch_size) for rank in range(dp_size)]
        assert all(len(shard) == num_micro_batches for shard in shards)
        assert all(len(micro_batch) == micro_batch_size for shard in shards for micro_batch in shard)
        rows = [row for shard in shards for micro_batch in shard for row in micro_batch]
        assert sorted(rows) == sorted(stream.rows(step))
        assert stream.shard(step, 0, 1, global_batch_size) == [stream.rows(step)]


@given(
    num_rows=st.integers(1, 50), left_out=st.integers(0, 10), size=st.integers(1, 20), seed=st.integers(0, 99)
)
@settings(deadline=None)
def test_every_row_comes_at_most_once_an_epoch(num_rows: int, left_out: int, size: int, seed: int) -> None:
    rows_an_epoch = max(num_rows - left_out, 1)
    stream = Stream(num_rows, rows_an_epoch, size, seed)
    steps = 3 * rows_an_epoch // size + 1
    rows = [row for step in range(steps) for row in stream.rows(step)]
    for epoch in range(3):
        counts = Counter(rows[epoch * rows_an_epoch : (epoch + 1) * rows_an_epoch])
        assert max(counts.values(), default=1) == 1
        assert all(0 <= row < num_rows for row in counts)
    whole = rows[: 3 * rows_an_epoch]
    assert len(whole) == 3 * rows_an_epoch


def test_epochs_are_shuffled_anew_and_by_the_seed() -> None:
    epochs = [Stream(100, 100, 100, 1).rows(step) for step in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert Stream(100, 100, 100, 2).rows(0) == epochs[1]  # seed + epoch
    assert Stream(100, 100, 100, 3).rows(0) not in epochs[:2]


@pytest.mark.case("b08")
def test_stream_resumed_at_the_end_of_an_epoch_goes_on_like_the_uninterrupted_one() -> None:
    assert train_iters(8, global_batch_size=4, epochs=3) == 6
    uninterrupted = Stream(8, 8, 4, 42)
    whole = [uninterrupted.rows(step) for step in range(6)]
    resumed = Stream(8, 8, 4, 42)
    assert [resumed.rows(step) for step in range(2, 6)] == whole[2:]
    assert all(sorted(whole[step] + whole[step + 1]) == list(range(8)) for step in (0, 2, 4))


def test_step_is_the_same_in_whatever_order_steps_are_asked_for() -> None:
    stream = Stream(10, 9, 4, 7)
    forwards = [stream.rows(step) for step in range(20)]
    assert [stream.rows(step) for step in reversed(range(20))] == forwards[::-1]


def test_last_rows_that_fill_no_batch_are_left_out() -> None:
    assert epoch_rows(23, micro_batch_size=2, dp_size=4) == 16
    assert train_iters(16, global_batch_size=16, epochs=3) == 3
    assert train_iters(16, global_batch_size=32, epochs=3) == 1


def test_fewer_rows_than_one_micro_batch_on_every_rank_are_refused() -> None:
    with pytest.raises(UsageError, match="fewer training rows than one micro batch"):
        epoch_rows(7, micro_batch_size=2, dp_size=4)


@pytest.mark.parametrize("epochs", [0, 1])
def test_fewer_rows_than_one_step_takes_are_refused(epochs: int) -> None:
    with pytest.raises(UsageError, match="too few training rows for a single step"):
        train_iters(8, global_batch_size=16, epochs=epochs)


@pytest.mark.parametrize(("micro_batch_size", "global_batch_size"), [(2, 12), (2, 0), (0, 8)])
def test_batch_sizes_that_do_not_go_together_are_refused(
    micro_batch_size: int, global_batch_size: int
) -> None:
    with pytest.raises(UsageError, match="must be a multiple of micro_batch_size"):
        check_batch_sizes(micro_batch_size, 4, global_batch_size)


@pytest.mark.parametrize("sizes", [(4, 5, 2), (4, 0, 2), (0, 0, 2), (4, 4, 0)])
def test_stream_without_rows_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="An epoch has at least 1 row"):
        Stream(*sizes, seed=1)
