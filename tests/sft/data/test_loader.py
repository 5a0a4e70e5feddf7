from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from landfall.errors import DataError
from landfall.sft.data.batch import Example, MicroBatch
from landfall.sft.data.dataset import Rows, prepare
from landfall.sft.data.loader import eval_batches, micro_batches
from landfall.sft.data.processor import Processor
from landfall.sft.data.sampler import Stream
from tests.sft.data.conftest import chat


class NumberedRows:
    """Row n is n + 1 tokens of value n; with what its process looks like as its positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Example:
        ids = torch.full((index + 1,), index)
        facts = [torch.get_num_threads(), int("megatron" in sys.modules), os.getpid()]
        positions = torch.tensor(facts)[:, None].expand(3, index + 1)
        return Example(ids, ids, positions, None, None, f"train.jsonl:{index + 1}")


def _row_ids(batch: MicroBatch) -> list[int]:
    return batch.input_ids[batch.cu_seqlens[:-1].long()].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_the_rows_of_the_stream_from_any_step(num_workers: int) -> None:
    rows, stream = NumberedRows(13), Stream(13, 12, 8, 1)
    for first_step in (0, 3):
        for dp_rank in range(2):
            steps = list(micro_batches(rows, stream, first_step, 5, dp_rank, 2, 2, num_workers))
            got = [[_row_ids(micro_batch) for micro_batch in step] for step in steps]
            assert got == [stream.shard(step, dp_rank, 2, 2) for step in range(first_step, 5)]


def test_workers_use_one_thread_and_their_own_processes() -> None:
    steps = micro_batches(NumberedRows(16), Stream(16, 16, 8, 1), 0, 2, 0, 1, 2, num_workers=2)
    facts = torch.cat([micro_batch.position_ids for step in steps for micro_batch in step], dim=1)
    assert set(facts[0].tolist()) == {1}
    assert len(set(facts[2].tolist())) == 2 and os.getpid() not in facts[2]


def test_loading_does_not_touch_the_random_numbers_of_training() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(micro_batches(NumberedRows(16), Stream(16, 16, 8, 1), 0, 2, 0, 1, 2, num_workers=1))
    list(eval_batches(NumberedRows(5), 0, 1, 2, num_workers=0))
    assert torch.rand(4).equal(expected)


@pytest.fixture
def photos(
    image: Callable[..., Path], jsonl: Callable[..., str], config: Callable[..., Any], processor: Processor
) -> Rows:
    for n in range(4):
        image(f"{n}.png", 64 + 32 * n, 64)
    return prepare(config(jsonl([chat("q", "a", image=f"{n}.png") for n in range(4)])), processor).train


@pytest.mark.parametrize("num_workers", [0, 1])
def test_micro_batch_of_photos_holds_their_pixels_in_order(photos: Rows, num_workers: int) -> None:
    stream = Stream(4, 4, 4, 7)
    ((batch,),) = micro_batches(photos, stream, 0, 1, 0, 1, 4, num_workers)
    assert batch.grid_thw is not None and batch.pixel_values is not None
    assert batch.grid_thw.tolist() == [[1, 4, 4 + 2 * n] for n in stream.rows(0)]
    assert batch.pixel_values.shape == (int(batch.grid_thw.prod(1).sum()), 1536)
    assert batch.cu_seqlens[-1] == batch.num_tokens == int(photos.lengths.sum())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("harm", ["gone", "cut", "resized"])
def test_photo_that_breaks_during_training_is_named_by_file_and_line(
    photos: Rows, tmp_path: Path, image: Callable[..., Path], num_workers: int, harm: str
) -> None:
    path = tmp_path / "2.png"
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-500])
    else:
        image("2.png", 640, 480)
    with pytest.raises(DataError) as caught:
        list(micro_batches(photos, Stream(4, 4, 2, 7), 0, 2, 0, 1, 1, num_workers))
    assert f"{tmp_path}/train.jsonl:3" in caught.value.where
    assert "2.png" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 13])
def test_evaluation_sees_every_row_once_and_equally_often_on_every_rank(num_rows: int) -> None:
    shares = [list(eval_batches(NumberedRows(num_rows), rank, 3, 2, num_workers=0)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == -(-num_rows // 6)
    assert all(len(share) <= 1 for rank in shares for share in rank)
    seen = [row for rank in shares for share in rank for batch in share for row in _row_ids(batch)]
    assert sorted(seen) == list(range(num_rows))
    assert shares[0][0] and _row_ids(shares[0][0][0])[0] == 0


def test_workers_do_not_outlive_a_killed_rank_nor_import_megatron() -> None:
    code = (
        "import sys; from landfall.sft.data.loader import micro_batches\n"
        "from landfall.sft.data.sampler import Stream; from tests.sft.data.test_loader import NumberedRows\n"
        "steps = micro_batches(NumberedRows(64), Stream(64, 64, 2, 1), 0, 32, 0, 1, 1, num_workers=1)\n"
        "print(*next(steps)[0].position_ids[1:, 0].tolist(), flush=True); sys.stdin.read()\n"
    )
    root = str(Path(__file__).parents[3])
    rank = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    has_megatron, worker = map(int, rank.stdout.readline().split())
    assert not has_megatron
    os.kill(worker, 0)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    deadline = time.monotonic() + 2
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
