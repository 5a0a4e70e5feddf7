from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from landfall.errors import DataError, UsageError
from landfall.sft.data.dataset import Rows, prepare
from landfall.sft.data.processor import Processor
from tests.sft.data.conftest import chat

Jsonl, Config, ImageFile = Callable[..., str], Callable[..., Any], Callable[..., Path]


def _rows(count: int, word: str = "row") -> list[dict[str, Any]]:
    return [chat(f"{word} {n}?", f"{word} {n}!") for n in range(count)]


def _sources(rows: Rows | None) -> list[str]:
    assert rows is not None
    return [rows.source(index) for index in range(len(rows))]


def test_every_mistake_is_reported_in_one_error_before_training(
    jsonl: Jsonl, config: Config, processor: Processor, image: ImageFile
) -> None:
    image("broken.png", 64, 64).write_bytes(b"no image")
    data = jsonl(
        [
            chat("fine", "fine"),
            chat("q", "a", images=["gone.png"]),
            chat("q", "a", images=["broken.png"]),
            '{"messages": [',
            {"messages": []},
            {"messages": [{"role": "narrator", "content": "q"}]},
            {"messages": [{"role": "user", "content": "q"}]},
        ]
    )
    more = jsonl(["[1]"], "more.jsonl")
    with pytest.raises(DataError) as caught:
        prepare(config(data, val_dataset=(more,)), processor)
    message = str(caught.value)
    assert message.startswith("7 of 8 rows can't be used")
    assert f"{data}:2: there is no image {Path(data).parent}/gone.png" in message
    assert f"{data}:3: unreadable image" in message
    assert f"{data}:4: broken JSON" in message
    assert f"{data}:5: there are no messages" in message
    assert f"{data}:6: unknown role 'narrator'" in message
    assert "and 2 more" in message


def test_image_path_is_relative_to_the_file_then_to_the_working_directory(
    tmp_path: Path,
    jsonl: Jsonl,
    config: Config,
    processor: Processor,
    image: ImageFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image("here/both.png", 64, 64), image("there/both.png", 96, 64), image("there/one.png", 128, 64)
    data = jsonl([chat("q", "a", images=["both.png"]), chat("q", "a", image="one.png")], "here/train.jsonl")
    monkeypatch.chdir(tmp_path / "there")
    train = prepare(config(os.path.relpath(data)), processor).train
    assert [train[index].grid_thw.tolist() for index in range(2)] == [[[1, 4, 4]], [[1, 4, 8]]]  # type: ignore


def test_lengths_count_image_tokens(
    jsonl: Jsonl, config: Config, processor: Processor, image: ImageFile
) -> None:
    image("a.png", 640, 480)
    prepared = prepare(config(jsonl([chat("q", "a"), chat("q", "a", images=["a.png"])])), processor)
    assert prepared.train.lengths.tolist() == [prepared.train[n].input_ids.numel() for n in range(2)]
    assert prepared.train.lengths[1] - prepared.train.lengths[0] == 302
    assert prepared.report.longest_row == prepared.train.lengths[1]
    assert prepared.report.num_train_tokens == prepared.train.lengths.sum()


@pytest.mark.parametrize(("ratio", "num_val"), [(0.0, None), (0.001, 2), (0.1, 3), (0.5, 15)])
def test_validation_rows_are_split_from_each_dataset(
    jsonl: Jsonl, config: Config, processor: Processor, ratio: float, num_val: int | None
) -> None:
    files = [jsonl(_rows(20), "a.jsonl"), jsonl(_rows(10), "b.jsonl")]
    prepared = prepare(config(*files, split_dataset_ratio=ratio), processor)
    if num_val is None:
        assert prepared.val is None and len(prepared.train) == 30
        return
    train, val = _sources(prepared.train), _sources(prepared.val)
    assert len(val) == num_val
    assert len(set(train) | set(val)) == len(train) + len(val) == 30
    assert sum(source.startswith(files[1]) for source in val) == max(int(10 * ratio), 1)


def test_split_depends_on_the_seed_alone(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    data = jsonl(_rows(30))
    first, again, other = (
        prepare(config(data, split_dataset_ratio=0.2, seed=seed), processor) for seed in (1, 1, 2)
    )
    assert _sources(first.val) == _sources(again.val) != _sources(other.val)
    assert first.digest == again.digest != other.digest


def test_repeated_row_is_never_in_both_splits(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    prepared = prepare(config(jsonl(_rows(10)) + "#25", split_dataset_ratio=0.3), processor)
    train, val = _sources(prepared.train), _sources(prepared.val)
    assert len(val) == 3 and not set(train) & set(val)
    assert len(train) in range(25 - 9, 25 - 5) and len(set(train)) == 7


def test_own_validation_data_disables_the_split(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    data, val = jsonl(_rows(10)), jsonl(_rows(3, "val"), "val.jsonl")
    prepared = prepare(config(data, val_dataset=(val,), split_dataset_ratio=0.5), processor)
    assert len(prepared.train) == 10
    assert _sources(prepared.val) == [f"{val}:{n}" for n in (1, 2, 3)]
    assert list(prepared.split_off_rows()) == []


def test_rows_split_off_can_be_written_and_read_back(
    tmp_path: Path, jsonl: Jsonl, config: Config, processor: Processor, image: ImageFile
) -> None:
    image("pictures/a.png", 96, 64)
    rows = [chat(f"问题 {n}", "a", images=["pictures/a.png"], id=n) for n in range(10)]
    prepared = prepare(config(jsonl(rows), split_dataset_ratio=0.3), processor)
    val = prepared.val
    assert val is not None
    (tmp_path / "elsewhere").mkdir()
    written = tmp_path / "elsewhere" / "val_dataset.jsonl"
    prepared.write_split_off(written)
    read = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert [{**row, "images": ["pictures/a.png"]} for row in read] == [rows[row["id"]] for row in read]
    assert "问题" in written.read_text(encoding="utf-8")
    back = prepare(config(jsonl(_rows(2), "b.jsonl"), val_dataset=(str(written),)), processor).val
    assert back is not None
    for index in range(len(val)):
        assert back[index].input_ids.equal(val[index].input_ids)
        assert back[index].pixel_values.equal(val[index].pixel_values)  # type: ignore


def test_nothing_left_to_train_on_is_refused(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    data = jsonl(_rows(3))
    with pytest.raises(DataError, match="No row is left to train on") as caught:
        prepare(config(data, max_length=5), processor)
    assert f"{data}:1" in str(caught.value) and "3 rows left out" in str(caught.value)


def test_dataset_without_rows_is_refused(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    with pytest.raises(DataError, match="no rows"):
        prepare(config(jsonl(["", "  "])), processor)


def test_dataset_of_one_row_can_not_be_split(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    with pytest.raises(UsageError, match="too small to set validation rows aside"):
        prepare(config(jsonl(_rows(1)), split_dataset_ratio=0.01), processor)


@pytest.mark.parametrize(
    "options",
    [{"split_dataset_ratio": 1.0}, {"split_dataset_ratio": -0.1}, {"max_length": 0}, {"dataset_num_proc": 0}],
)
def test_option_out_of_range_is_refused(config: Config, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        config("train.jsonl", **options)


def test_no_dataset_is_refused(config: Config) -> None:
    with pytest.raises(UsageError, match="No dataset"):
        config()


def test_rows_mapped_by_several_processes_are_the_same(
    jsonl: Jsonl, config: Config, processor: Processor
) -> None:
    data = jsonl([*_rows(600), ""])
    alone = prepare(config(data), processor)
    together = prepare(config(data, dataset_num_proc=2), processor)
    assert alone.digest == together.digest
    assert _sources(together.train) == [f"{data}:{n}" for n in range(1, 601)]


def test_rows_survive_pickling(jsonl: Jsonl, config: Config, processor: Processor) -> None:
    train = prepare(config(jsonl(_rows(3))), processor).train
    assert pickle.loads(pickle.dumps(train))[2].input_ids.equal(train[2].input_ids)
