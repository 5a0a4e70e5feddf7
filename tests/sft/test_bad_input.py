"""What cannot be trained on is refused before training, on every rank, with exit code 2 and a reason."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from landfall.engine.verify import verify
from tests.sft.trainer import Sft, World, as_rank, picture, row, run_sft, write_rows

Train = Callable[..., Sft]


@dataclass(frozen=True)
class Bad:
    """Flags that are to be refused, and what the message has to name."""

    says: tuple[str, ...]
    flags: dict[str, Any] = field(default_factory=dict)


Case = Callable[[World, Path], Bad]


def no_model_folder(world: World, folder: Path) -> Bad:
    return Bad(("there is no such model", f"{folder}/nowhere"), {"model": folder / "nowhere"})


def model_folder_without_config(world: World, folder: Path) -> Bad:
    (folder / "model").mkdir()
    return Bad((f"{folder}/model/config.json",), {"model": folder / "model"})


def model_of_another_type(world: World, folder: Path) -> Bad:
    model = changed_model(world, folder / "model", lambda config: config.update(model_type="llama"))
    return Bad(("config.json", "model_type llama", "expected: model_type qwen3_vl"), {"model": model})


def unknown_model_type(world: World, folder: Path) -> Bad:
    return Bad(("--model_type", "llama", "qwen3_vl"), {"model_type": "llama"})


def weights_of_another_size(world: World, folder: Path) -> Bad:
    def widen(config: dict[str, Any]) -> None:
        config["text_config"]["intermediate_size"] *= 2

    return Bad(("mlp", "shape"), {"model": changed_model(world, folder / "model", widen)})


def weights_that_are_missing(world: World, folder: Path) -> Bad:
    model = changed_model(world, folder / "model")
    (model / "model.safetensors").unlink()
    return Bad((str(model), "safetensors"), {"model": model})


def no_network_for_an_id(world: World, folder: Path) -> Bad:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    says = ("the model was not found", "nobody/nothing-at-all", "pass its folder")
    return Bad(says, {"model": "nobody/nothing-at-all", "env": env})


def missing_image(world: World, folder: Path) -> Bad:
    rows = [row("<image>?", "1", picture(folder / "0.png", 64, 0)), row("<image>?", "1", "gone.png")]
    data = write_rows(folder / "bad.jsonl", rows)
    return Bad((f"{data}:2: there is no image {folder}/gone.png",), {"dataset": data})


def unreadable_image(world: World, folder: Path) -> Bad:
    whole = picture(folder / "cut.png", 64, 0)
    whole.write_bytes(whole.read_bytes()[:3000])
    data = write_rows(folder / "bad.jsonl", [row("<image>?", "1", whole)] * 2)
    return Bad((f"{data}:1: unreadable image {whole}", f"{data}:2: "), {"dataset": data})


def broken_json(world: World, folder: Path) -> Bad:
    data = write_rows(folder / "bad.jsonl", [row("?", "1")] * 6 + ['{"messages": [{"role"'])
    return Bad((f"{data}:7: broken JSON",), {"dataset": data})


def broken_validation_row(world: World, folder: Path) -> Bad:
    data = write_rows(folder / "val.jsonl", [row("?", "1"), '{"text": "1"}'])
    return Bad((f"{data}:2: neither messages",), {"val_dataset": data})


def no_dataset_file(world: World, folder: Path) -> Bad:
    return Bad((f"{folder}/none.jsonl",), {"dataset": folder / "none.jsonl"})


def nothing_left_of_the_dataset(world: World, folder: Path) -> Bad:
    return Bad(("No row is left to train on", "train.jsonl:1: ", "48 rows left out"), {"max_length": 5})


def empty_dataset(world: World, folder: Path) -> Bad:
    data = write_rows(folder / "empty.jsonl", ["", ""])
    return Bad(("has no rows", str(data)), {"dataset": data})


def too_long_row_that_may_not_be_left_out(world: World, folder: Path) -> Bad:
    flags = {"max_length": 30, "truncation_strategy": "raise"}
    return Bad((f"{world.data}:1: ", "tokens, max_length 30"), flags)


def more_ranks_than_rows(world: World, folder: Path) -> Bad:
    data = write_rows(folder / "one.jsonl", [row("?", "1")])
    flags = {"dataset": data, "micro_batch_size": 1, "global_batch_size": 2}
    return Bad(("fewer training rows", "got: 1 rows", "2 data-parallel ranks"), flags)


def global_batch_that_cannot_be_shared(world: World, folder: Path) -> Bad:
    flags = {"micro_batch_size": 4, "global_batch_size": 12}
    return Bad(("--global_batch_size", "got: 12", "multiple of 8", "8 and 16"), flags)


def unknown_flag(world: World, folder: Path) -> Bad:
    return Bad(("--warmup_fraction: no such flag", "--lr_warmup_fraction"), {"warmup_fraction": 0.1})


def file_in_the_way_of_the_save_folder(world: World, folder: Path) -> Bad:
    (folder / "file").write_text("mine")
    return Bad(("The save folder can't be used", f"{folder}/file/out"), {"save": folder / "file" / "out"})


def folder_without_a_checkpoint(world: World, folder: Path) -> Bad:
    return Bad(("There is no committed checkpoint here", str(folder)), {"load": folder})


CASES: tuple[Case, ...] = (
    no_model_folder,
    model_folder_without_config,
    model_of_another_type,
    unknown_model_type,
    weights_of_another_size,
    weights_that_are_missing,
    no_network_for_an_id,
    missing_image,
    unreadable_image,
    broken_json,
    broken_validation_row,
    no_dataset_file,
    nothing_left_of_the_dataset,
    empty_dataset,
    too_long_row_that_may_not_be_left_out,
    more_ranks_than_rows,
    global_batch_that_cannot_be_shared,
    unknown_flag,
    file_in_the_way_of_the_save_folder,
    folder_without_a_checkpoint,
)


def changed_model(
    world: World, folder: Path, change: Callable[[dict[str, Any]], None] = lambda config: None
) -> Path:
    """A copy of the model whose config.json is another; its weights stay what they are."""
    shutil.copytree(world.model, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_refused(run: Sft, *says: str) -> None:
    """Exit code 2 on every rank, one message, and nothing trained, saved or left behind."""
    told = "".join(run.outputs)
    assert set(run.exit_codes) == {2}, told
    for part in says:
        assert part in told, f"{part!r} is not in:\n{told}"
    assert told.count("landfall sft: rank") == 1 and "Traceback" not in told, told
    assert "step 1/" not in told
    if run.save.is_dir():
        assert [str(path) for path in run.save.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_is_refused_before_training(case: Case, world: World, tmp_path: Path, sft: Train) -> None:
    bad = case(world, tmp_path)
    refused = sft(ranks=2, timeout_s=60, ends_well=False, **{"train_iters": 1, **bad.flags})
    assert_refused(refused, *bad.says)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``mounted("size=1m")`` is a folder that is a file system of its own. Needs the right to mount."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "landfall-test", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount a file system here")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_read_only_file_system_is_refused(mounted: Callable[[str], Path], sft: Train) -> None:
    folder = mounted("ro,size=1m")
    refused = sft(ranks=2, train_iters=1, save=folder / "out", ends_well=False)
    assert_refused(refused, "can't be used", f"{folder}/out", "Read-only file system")


@pytest.mark.case("a06")
@pytest.mark.parametrize(
    ("filled", "says"),
    [(False, "There is no room for a single checkpoint"), (True, "A rehearsal of the save failed")],
    ids=["too small", "full"],
)
def test_file_system_without_room_for_a_checkpoint_is_refused(
    filled: bool, says: str, mounted: Callable[[str], Path], sft: Train
) -> None:
    folder = mounted("size=1m")
    if filled:
        with pytest.raises(OSError):
            (folder / "filler").write_bytes(bytes(2 << 20))
    refused = sft(ranks=2, train_iters=1, save=folder / "out", ends_well=False)
    assert_refused(refused, says, str(folder), "bytes free")
    assert [path for path in (folder / "out").rglob("*") if path.is_file()] == []


def as_rank_1_that_may_not_write(argv: list[str]) -> None:
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    as_rank(argv)


@pytest.mark.case("a06")
def test_one_rank_that_cannot_write_is_named_by_all(sft: Train) -> None:
    refused = sft(ranks=2, train_iters=1, entry=as_rank_1_that_may_not_write, ends_well=False)
    assert_refused(refused, "A rehearsal of the save failed", "rank 1", "EFBIG")


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by what is wrong with them."""
    folder = tmp_path_factory.mktemp("saved")

    def shorten(config: dict[str, Any]) -> None:
        config["text_config"]["num_hidden_layers"] = 2

    def save(name: str, **flags: Any) -> Path:
        return run_sft(world, folder / name, train_iters=1, **flags).checkpoint(1)

    light = {"no_save_optim": True, "no_save_rng": True}
    return {
        "of another model": save("other", model=changed_model(world, folder / "model", shorten)),
        "weights of another model": save("light other", model=folder / "model", **light),
        "weights only": save("light", **light),
        "good": save("good"),
    }


@pytest.mark.parametrize(
    ("which", "flags", "says"),
    [
        ("of another model", {}, ("another model", "layers")),
        ("weights of another model", {"finetune": True}, ("of this model",)),
        ("weights only", {}, ("no optimizer state", "--no_save_optim", "--finetune true")),
        ("good", {"global_batch_size": 16}, ("global_batch_size 16", "global_batch_size 8")),
        ("good", {"seed": 7}, ("seed 7", "seed 42")),
        ("good", {"split_dataset_ratio": 0.5}, ("num_rows 24", "num_rows 48")),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_and_stays(
    which: str, flags: dict[str, Any], says: tuple[str, ...], saved: dict[str, Path], sft: Train
) -> None:
    checkpoint = saved[which]
    refused = sft(ranks=2, train_iters=2, load=checkpoint, ends_well=False, **flags)
    assert_refused(refused, str(checkpoint), *says)
    assert verify(checkpoint).ok


def test_refusal_leaves_earlier_checkpoints_in_the_save_folder_alone(sft: Train) -> None:
    first = sft(train_iters=1, add_version=False)
    before = {path: path.stat().st_mtime_ns for path in first.save.rglob("*") if path.is_file()}

    refused = sft(train_iters=1, add_version=False, max_length=5, ends_well=False)

    assert refused.exit_codes == [2]
    assert {path: path.stat().st_mtime_ns for path in first.save.rglob("*") if path.is_file()} == before
    assert verify(first.checkpoint(1)).ok
