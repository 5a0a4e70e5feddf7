from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from landfall.demo.answer import answer
from landfall.demo.prepare import DemoPaths, prepare
from landfall.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return prepare(tmp_path_factory.mktemp("demo"), ranks=1)


def question(row: dict) -> list[dict]:
    text = row["messages"][0]["content"].removeprefix("<image>")
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def one_by_one(folder: Path, rows: list[dict], root: Path) -> list[str]:
    """What the model says to each row alone, without padding or a cache: the argmax, token by token."""
    from PIL import Image

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(folder),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
    )
    answers = []
    for row in rows:
        vision = processor(images=[Image.open(root / row["images"][0])], return_tensors="pt")
        text = tokenizer.apply_chat_template(question(row), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 4), return_tensors="pt")["input_ids"]
        prompt = ids.shape[1]
        for _ in range(3):
            types = (ids == model.config.image_token_id).int()
            with torch.no_grad():
                logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **vision).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] in model.generation_config.eos_token_id:
                break
        answers.append(tokenizer.decode(ids[0, prompt:], skip_special_tokens=True).strip())
    return answers


@pytest.fixture(scope="module")
def outspoken(made: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers differ from row to row: larger random weights."""
    folder = shutil.copytree(made.model, tmp_path_factory.mktemp("model") / "outspoken")
    weights = load_file(folder / "model.safetensors")
    scaled = {
        name: (tensor * 4 if tensor.dim() > 1 else tensor).contiguous() for name, tensor in weights.items()
    }
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_batched_answers_are_those_that_the_model_gives_to_each_row_alone(
    outspoken: Path, made: DemoPaths, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in made.test_jsonl.read_text().splitlines()[:60]]
    answers = one_by_one(outspoken, rows, made.data)
    assert len(set(answers)) > 5
    for row, given in zip(rows[:-10], answers, strict=False):
        row["messages"][1]["content"] = given
    for row in rows[-10:]:
        row["messages"][1]["content"] = "something else"
    shutil.copytree(made.data / "images", tmp_path / "images")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score = answer(outspoken, tmp_path / "test.jsonl")
    assert (score.right, score.total) == (50, 60)
    assert score.share == 50 / 60
    assert score.samples[0].startswith(rows[0]["images"][0]) and score.samples[0].endswith("(right)")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("missing", "deepstack_merger_list"),
        ("unexpected", "model.extra.weight"),
        ("reshaped", "embed_tokens"),
    ],
)
def test_weights_that_are_not_exactly_the_models_are_refused(
    damage: str, named: str, made: DemoPaths, tmp_path: Path
) -> None:
    folder = shutil.copytree(made.model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    if damage == "missing":
        weights = {name: tensor for name, tensor in weights.items() if "deepstack" not in name}
    elif damage == "unexpected":
        weights["model.extra.weight"] = torch.ones(2)
    else:
        name = "model.language_model.embed_tokens.weight"
        weights[name] = weights[name][:500].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=named):
        answer(folder, made.test_jsonl)


def test_no_questions_are_a_usage_error(made: DemoPaths, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no questions"):
        answer(made.model, tmp_path / "test.jsonl")
