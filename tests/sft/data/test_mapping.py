"""What lies in the cache is taken only while all that it depends on is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from landfall.errors import DataError
from landfall.sft.data.dataset import Prepared, prepare
from landfall.sft.data.processor import Processor
from tests.sft.data.conftest import chat

Config = Callable[..., Any]


@pytest.fixture
def data(jsonl: Callable[..., str], image: Callable[..., Path]) -> str:
    image("a.png", 96, 64)
    return jsonl([chat("a cat?", "yes", images=["a.png"]), chat("a dog?", "no"), chat("a" * 50, "b")])


def _cached(config: Config) -> dict[Path, tuple[int, int]]:
    """The files in the cache, each with what changes when it is written again."""
    files = Path(config("x").cache_dir).glob("*.arrow")
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def _texts(prepared: Prepared, processor: Processor) -> list[str]:
    rows = [prepared.train[index] for index in range(len(prepared.train))]
    return [processor.tokenizer.decode(row.input_ids) for row in rows]


def test_second_run_takes_what_the_first_wrote(data: str, config: Config, processor: Processor) -> None:
    first = prepare(config(data, load_from_cache_file=True), processor)
    files = _cached(config)
    second = prepare(config(data, load_from_cache_file=True), processor)
    assert len(files) == 1 and _cached(config) == files
    assert second.digest == first.digest
    assert _texts(second, processor) == _texts(first, processor)


def test_other_ranks_take_what_the_leader_wrote_even_without_the_cache_flag(
    data: str, config: Config, processor: Processor
) -> None:
    leader = prepare(config(data), processor)
    files = _cached(config)
    follower = prepare(config(data), processor, leader=False)
    assert _cached(config) == files and follower.digest == leader.digest
    prepare(config(data), processor)
    assert _cached(config) != files


def test_changed_file_is_read_anew(data: str, config: Config, processor: Processor) -> None:
    prepare(config(data, load_from_cache_file=True), processor)
    stat = os.stat(data)
    text = Path(data).read_text().replace("yes", "noo")
    Path(data).write_text(text)
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert os.stat(data).st_size == stat.st_size
    assert "noo" in _texts(prepare(config(data, load_from_cache_file=True), processor), processor)[0]


@pytest.mark.parametrize("option", [{"max_length": 40}, {"truncation_strategy": "right"}])
def test_other_options_have_their_own_cache(
    data: str, config: Config, processor: Processor, option: dict[str, Any]
) -> None:
    options = {"max_length": 50, "truncation_strategy": "left", "load_from_cache_file": True}
    first = prepare(config(data, **options), processor)
    assert first.digest != prepare(config(data, **{**options, **option}), processor).digest
    assert len(_cached(config)) == 2


def test_other_image_limit_has_its_own_cache(data: str, config: Config, model_folder: Path) -> None:
    wide, narrow = (Processor.from_folder(model_folder, tokens) for tokens in (None, 5))
    first = prepare(config(data, load_from_cache_file=True), wide)
    second = prepare(config(data, load_from_cache_file=True), narrow)
    assert first.train.lengths[0] - second.train.lengths[0] == 6 - 2  # 96x64 becomes 64x32


def test_other_tokenizer_has_its_own_cache(
    data: str, config: Config, processor: Processor, model_folder: Path, tmp_path: Path
) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|endoftext|>"', '"<|endofdoc|>"'))
    other = Processor.from_folder(tmp_path)
    assert other.fingerprint != processor.fingerprint
    prepare(config(data, load_from_cache_file=True), processor)
    prepare(config(data, load_from_cache_file=True), other)
    assert len(_cached(config)) == 2


def test_changed_image_is_measured_anew(
    data: str, config: Config, processor: Processor, image: Callable[..., Path]
) -> None:
    first = prepare(config(data, load_from_cache_file=True), processor)
    image("a.png", 640, 480)
    second = prepare(config(data, load_from_cache_file=True), processor)
    assert second.train.lengths[0] - first.train.lengths[0] == 300 - 6
    grid = second.train[0].grid_thw
    assert grid is not None and grid.tolist() == [[1, 30, 40]]


def test_image_that_is_gone_is_reported_though_the_row_was_cached(
    data: str, config: Config, processor: Processor
) -> None:
    prepare(config(data, load_from_cache_file=True), processor)
    (Path(data).parent / "a.png").unlink()
    with pytest.raises(DataError, match="1 of 3 rows can't be used"):
        prepare(config(data, load_from_cache_file=True), processor)


def test_mistake_that_was_mended_outside_the_file_is_forgotten(
    data: str, config: Config, processor: Processor, image: Callable[..., Path]
) -> None:
    path = Path(data).parent / "a.png"
    path.unlink()
    with pytest.raises(DataError):
        prepare(config(data, load_from_cache_file=True), processor)
    image("a.png", 96, 64)
    assert len(prepare(config(data, load_from_cache_file=True), processor).train) == 3


def test_image_with_transparency_is_put_on_white(
    tmp_path: Path, jsonl: Callable[..., str], config: Config, processor: Processor
) -> None:
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGB", (64, 64), "white").save(tmp_path / "white.png")
    rows = [chat("q", "a", image=name) for name in ("clear.png", "white.png")]
    train = prepare(config(jsonl(rows)), processor).train
    assert train[0].pixel_values.equal(train[1].pixel_values)  # type: ignore[union-attr,arg-type]
