from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from landfall.demo.prepare import DemoPaths, prepare
from landfall.demo.script import recipe
from landfall.errors import UsageError
from landfall.format.hf_folder import folder_entries
from landfall.models.qwen3_vl import Qwen3VLNames

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return prepare(tmp_path_factory.mktemp("demo"), ranks=4)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sft_arguments(script: Path, tmp_path: Path, **environment: str) -> list[str]:
    """What the script passes to `landfall`: run with a `landfall` that writes down its arguments."""
    recorder = tmp_path / "bin" / "landfall"
    recorder.parent.mkdir(exist_ok=True)
    recorder.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\nenv > "$RECORD.env"\n')
    recorder.chmod(0o755)
    record = tmp_path / "arguments"
    path = f"{recorder.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", script], check=True, env={"PATH": path, "RECORD": str(record), **environment})
    return record.read_text(encoding="utf-8").splitlines()


def test_prepared_model_is_a_small_tied_qwen3_vl_in_bf16(made: DemoPaths) -> None:
    model, loading = Qwen3VLForConditionalGeneration.from_pretrained(made.model, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert 1.1e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    config = json.loads((made.model / "config.json").read_text())
    shapes = {name: its.shape for name, its in folder_entries(made.model).items()}
    assert shapes == Qwen3VLNames.from_config(config).hf_shapes()
    assert model.generation_config.do_sample is False


def test_prepared_tokenizer_speaks_qwens_chatml(made: DemoPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    config = json.loads((made.model / "config.json").read_text())
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit is this?"}]},
        {"role": "assistant", "content": "7"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which digit is this?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < config["text_config"]["vocab_size"] == len(tokenizer)
    assert ids.count(config["image_token_id"]) == ids.count(config["vision_start_token_id"]) == 1
    assert len(tokenizer("7<|im_end|>")["input_ids"]) == 2
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer("输出 ünd 🚢")["input_ids"]) == "输出 ünd 🚢"


def test_prepared_rows_are_kept_apart_and_have_their_pictures(made: DemoPaths) -> None:
    train, test = rows_of(made.train_jsonl), rows_of(made.test_jsonl)
    assert (len(train), len(test)) == (1497, 300)
    pictures = {row["images"][0] for row in train}, {row["images"][0] for row in test}
    assert not pictures[0] & pictures[1] and len(pictures[0] | pictures[1]) == 1797
    for rows in (train, test):
        assert {row["messages"][1]["content"] for row in rows} == set("0123456789")
        assert all(row["messages"][0]["content"].startswith("<image>") for row in rows)
    processor = Qwen2VLImageProcessorPil.from_pretrained(made.model)
    images = [Image.open(made.data / row["images"][0]) for row in test[:3]]
    assert [image.size for image in images] == [(64, 64)] * 3
    assert processor(images=images, return_tensors="pt")["image_grid_thw"].tolist() == [[1, 4, 4]] * 3


def test_prepared_folder_is_the_same_every_time(made: DemoPaths, tmp_path: Path) -> None:
    torch.rand(1)
    state = torch.get_rng_state()
    again = prepare(tmp_path / "again", ranks=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert snapshot(again.folder) == snapshot(made.folder)


def test_preparing_a_complete_folder_again_touches_nothing(made: DemoPaths, tmp_path: Path) -> None:
    copy = shutil.copytree(made.folder, tmp_path / "copy")
    with open(copy / "sft.sh", "a") as script:
        script.write("# my note\n")
    before = times(copy)
    assert prepare(copy, ranks=4) == DemoPaths(copy)
    assert times(copy) == before


def test_preparing_for_other_ranks_changes_only_the_script(made: DemoPaths, tmp_path: Path) -> None:
    copy = shutil.copytree(made.folder, tmp_path / "copy")
    prepare(copy, ranks=2)
    new, old = snapshot(copy), snapshot(made.folder)
    assert {name for name in new if new[name] != old.get(name)} == {"sft.sh", "demo.json"}
    assert b"NPROC_PER_NODE=${NPROC_PER_NODE:-2}" in new["sft.sh"]


@pytest.mark.parametrize("damage", ["killed early", "missing picture", "short weights", "no script"])
def test_half_made_folder_is_made_again_and_keeps_what_training_wrote(
    damage: str, made: DemoPaths, tmp_path: Path
) -> None:
    copy = DemoPaths(shutil.copytree(made.folder, tmp_path / "copy"))
    copy.output.mkdir()
    (copy.output / "checkpoint").write_text("trained")
    if damage == "killed early":
        (copy.folder / "demo.json").write_text('{"version": 1, "ranks": 0, "file_bytes": {}}')
        shutil.rmtree(copy.data / "images")
    elif damage == "missing picture":
        next((copy.data / "images").iterdir()).unlink()
    elif damage == "short weights":
        os.truncate(copy.model / "model.safetensors", 1000)
    else:
        copy.script.unlink()
    prepare(copy.folder, ranks=4)
    assert (copy.output / "checkpoint").read_text() == "trained"
    assert snapshot(copy.folder).items() >= snapshot(made.folder).items()


def test_folder_with_files_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("three years of work")
    with pytest.raises(UsageError, match="did not make"):
        prepare(tmp_path, ranks=4)
    assert snapshot(tmp_path) == {"model/thesis.txt": b"three years of work"}


def test_foreign_state_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("[]")
    with pytest.raises(UsageError, match="not the demo's file"):
        prepare(tmp_path, ranks=4)


def test_no_ranks_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        prepare(tmp_path, ranks=0)


def test_recipe_in_the_repository_is_the_one_in_the_package() -> None:
    assert (REPOSITORY / "recipes" / "qwen3_vl_sft.sh").read_text(encoding="utf-8") == recipe()


def test_demo_script_differs_from_the_recipe_only_in_commented_values_at_its_top(made: DemoPaths) -> None:
    ours, theirs = made.script.read_text(encoding="utf-8").splitlines(), recipe().splitlines()
    changed = [(new, old) for new, old in zip(ours, theirs, strict=True) if new != old]
    assert 10 <= len(changed) <= 13
    for new, old in changed:
        name = old.partition("=")[0]
        assert name.isupper() and new.startswith(f"{name}=${{{name}:-") and "  # " in new
    assert made.script.stat().st_mode & stat.S_IXUSR


def flags(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


REPORTED = """
    --model_type qwen3_vl --load_safetensors true --save_safetensors true --context_parallel_size 1
    --tensor_model_parallel_size 1 --pipeline_model_parallel_size 1 --split_dataset_ratio 0.01
    --load_from_cache_file true --bf16 true --attention_softmax_in_fp32 true --attention_backend flash
    --sequence_parallel false --packing false --freeze_llm false --freeze_vit false --freeze_aligner false
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --finetune true
    --cross_entropy_loss_fusion true --train_type full --lr_warmup_fraction 0.05 --min_lr 1e-8 --clip_grad 1.0
    --vit_gradient_checkpointing true --max_length 4096 --no_save_optim true --no_save_rng true
"""
REPORTED_SIZES = """
    --micro_batch_size 16 --global_batch_size 128 --lr 1e-5 --max_epochs 1 --save_interval 10000
    --eval_interval 10000 --num_workers 4 --dataset_num_proc 8 --model Qwen3-VL-4B-Instruct
"""


def test_recipe_passes_exactly_the_flags_of_the_report(tmp_path: Path) -> None:
    script = tmp_path / "recipe.sh"
    script.write_text(recipe(), encoding="utf-8")
    command, *arguments = sft_arguments(script, tmp_path, SFT_DATASET="my data.jsonl", SFT_DIR="/输出/x")
    expected = (
        flags(REPORTED.split())
        | flags(REPORTED_SIZES.split())
        | {"--dataset": "my data.jsonl", "--save": "/输出/x"}
    )
    assert command == "sft" and flags(arguments) == expected
    environment = (tmp_path / "arguments.env").read_text()
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n" in environment and "NPROC_PER_NODE=8\n" in environment


def test_recipe_without_dataset_says_what_to_set(tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", "-c", recipe()], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert run.returncode != 0 and "set SFT_DATASET to a jsonl file" in run.stderr


@pytest.mark.parametrize(("ranks", "micro", "rows"), [(1, 32, 32), (3, 11, 33), (4, 8, 32)])
def test_demo_script_passes_its_own_folder_and_sizes_that_divide(
    ranks: int, micro: int, rows: int, made: DemoPaths, tmp_path: Path
) -> None:
    folder = prepare(shutil.copytree(made.folder, tmp_path / "a folder"), ranks)
    command, *arguments = sft_arguments(folder.script, tmp_path)
    passed = flags(arguments)
    assert command == "sft" and passed.items() >= flags(REPORTED.split()).items()
    paths = (folder.model, folder.train_jsonl, folder.output)
    assert (passed["--model"], passed["--dataset"], passed["--save"]) == tuple(map(str, paths))
    assert (passed["--micro_batch_size"], passed["--global_batch_size"]) == (str(micro), str(rows))
    assert not folder.output.name.isascii()


def test_demo_script_yields_to_the_environment(made: DemoPaths, tmp_path: Path) -> None:
    _, *arguments = sft_arguments(made.script, tmp_path, LR="3e-4", SFT_DIR="elsewhere", NPROC_PER_NODE="2")
    assert flags(arguments)["--lr"] == "3e-4" and flags(arguments)["--save"] == "elsewhere"
    assert "CUDA_VISIBLE_DEVICES=0,1\n" in (tmp_path / "arguments.env").read_text()
