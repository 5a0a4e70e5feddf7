"""What ``--dataset`` may name, and rows from every type of file."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from landfall.errors import DataError, UsageError
from landfall.sft.data.dataset import prepare
from landfall.sft.data.processor import Processor
from landfall.sft.data.sources import LineSource, open_source
from landfall.sft.data.spec import parse_spec
from tests.sft.data.conftest import chat

ROWS = [{"query": f"question {n}", "response": f"answer {n}"} for n in range(5)]


def _csv(path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["query", "response"])
        writer.writeheader()
        writer.writerows(ROWS)


def _parquet(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(path)


def _folder(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_text("\n\n".join(map(json.dumps, ROWS))),
    "lines.json": lambda path: path.write_text("\ufeff" + "\r\n".join(map(json.dumps, ROWS))),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.csv": _csv,
    "a.parquet": _parquet,
    "saved": _folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_file_of_any_type_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    source = open_source(parse_spec(str(path)), tmp_path / "cache")
    assert [source.row(index) for index in range(len(source))] == ROWS
    assert source.place(1).startswith(str(path))


def test_folder_of_files_is_read_by_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS["a.jsonl"](folder / "train.jsonl")
    source = open_source(parse_spec(str(folder)), tmp_path / "cache")
    assert [source.row(index) for index in range(len(source))] == ROWS


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}')
    source = LineSource(path)
    assert [(source.place(n), source.row(n)) for n in range(len(source))] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"a": 2}),
    ]


def test_images_inside_a_table_become_files(
    tmp_path: Path, image: Callable[..., Path], config: Callable[..., Any], processor: Processor
) -> None:
    content = image("a.png", 96, 64).read_bytes()
    rows = [{**ROWS[0], "images": [{"bytes": content, "path": "x.png"}]}, {**ROWS[1], "images": []}]
    features = datasets.Features(
        query=datasets.Value("string"),
        response=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    prepared = prepare(config(str(tmp_path / "a.parquet")), processor)
    grid = prepared.train[0].grid_thw
    assert grid is not None and grid.tolist() == [[1, 4, 6]]
    assert prepared.train[1].grid_thw is None


def test_csv_value_stays_text_and_json_in_it_is_read(
    jsonl: Callable[..., str], tmp_path: Path, config: Callable[..., Any], processor: Processor
) -> None:
    path = tmp_path / "a.csv"
    messages = json.dumps(chat("how many?", "007")["messages"]).replace('"', '""')
    path.write_text(f'messages\n"{messages}"\n')
    example = prepare(config(str(path)), processor).train[0]
    assert "007<|im_end|>" in processor.tokenizer.decode(example.input_ids)


def test_csv_row_of_another_width_is_refused(
    tmp_path: Path, config: Callable[..., Any], processor: Processor
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("query,response\nq,a\nq\nq,a,b\n")
    with pytest.raises(DataError) as caught:
        prepare(config(str(path)), processor)
    assert "2 of 3 rows" in str(caught.value)
    assert f"{path}:3: the row has not as many values as the header" in str(caught.value)
    assert f"{path}:4" in str(caught.value)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 12])
def test_number_after_hash_takes_so_many_rows(
    tmp_path: Path, config: Callable[..., Any], processor: Processor, num_rows: int
) -> None:
    path = tmp_path / "a#1.jsonl"
    WRITERS["a.jsonl"](path)
    train = prepare(config(f"{path}#{num_rows}"), processor).train
    sources = [train.source(index) for index in range(len(train))]
    assert len(sources) == num_rows
    counts = {sources.count(source) for source in sources}
    assert counts <= {num_rows // 5, num_rows // 5 + 1}
    assert len(prepare(config(str(path)), processor).train) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.jsonl", "no such dataset file"),
        ("/nowhere/data", "no such dataset file"),
        ("./nowhere", "no such dataset file"),
        ("", "no such dataset file"),
        ("s3::owner/name", "no such dataset file"),
        ("nowhere.jsonl#5", "no such dataset file"),
        ("ms::owner/name#5", "modelscope download --dataset owner/name"),
        ("owner/name#0", "must be at least 1"),
        ("owner/name#many", "must be at least 1"),
    ],
)
def test_dataset_that_can_not_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["hf::owner/name:part#7", "owner/name:part#7"])
def test_hub_id_is_taken_apart(text: str) -> None:
    spec = parse_spec(text)
    assert (spec.path, spec.hub_id, spec.subset, spec.num_rows) == (None, "owner/name", "part", 7)


def test_hub_id_that_can_not_be_fetched_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from landfall.errors import UsageError\n"
        "from landfall.sft.data.sources import open_source; from landfall.sft.data.spec import parse_spec\n"
        "try: open_source(parse_spec('hf::landfall-tests/no-such-dataset'), Path(sys.argv[1]))\n"
        "except UsageError as error: print(error); sys.exit(7)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 7, ran.stderr
    assert "hf::landfall-tests/no-such-dataset" in ran.stdout
    assert "give the path of downloaded files" in ran.stdout


def test_file_of_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("q")
    with pytest.raises(UsageError, match="Unknown type"):
        open_source(parse_spec(str(tmp_path / "a.txt")), tmp_path)


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "a.csv"])
def test_file_that_is_broken_as_a_whole_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"[\xff\x00 no")
    with pytest.raises(UsageError, match="can't be read"):
        open_source(parse_spec(str(tmp_path / name)), tmp_path)
