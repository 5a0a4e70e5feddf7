"""Let plain transformers answer the held-out questions from an exported folder: no code of the trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from landfall.demo.progress import without_progress_bars
from landfall.errors import CheckpointError, UsageError

_BATCH_ROWS = 50
_MAX_NEW_TOKENS = 3
_NUM_SAMPLES = 5


@dataclass(frozen=True)
class Score:
    """How many answers were exactly right, and a few of them to look at."""

    right: int
    total: int
    samples: tuple[str, ...]
    """Lines such as ``images/0007.png  What number is written here?  7  (right)``."""

    @property
    def share(self) -> float:
        return self.right / self.total


def answer(checkpoint_folder: str | Path, test_jsonl: str | Path) -> Score:
    """Score the safetensors of a folder on the rows of a jsonl file, decoding greedily on the CPU.

    CheckpointError if the weights are not exactly the model's: missing, unexpected or of another shape.
    """
    folder, test_jsonl = Path(checkpoint_folder), Path(test_jsonl)
    rows = [json.loads(line) for line in test_jsonl.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise UsageError("there are no questions to answer", where=str(test_jsonl))
    model = _load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    answers: list[str] = []
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = _inputs(rows[start : start + _BATCH_ROWS], test_jsonl.parent, tokenizer, image_processor)
        with torch.inference_mode():
            tokens = model.generate(**batch, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)
        new_tokens = tokens[:, batch["input_ids"].shape[1] :]
        answers += [text.strip() for text in tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]
    return _score(rows, answers)


def _load(folder: Path) -> Any:
    # Wrong sizes are let through here to be refused by name below.
    with without_progress_bars():
        model, loading = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[problem]:
            names = sorted(map(str, loading[problem]))
            raise CheckpointError(
                f"the exported weights are not the model's: {problem.replace('_', ' ')}",
                where=str(folder),
                got=f"{len(names)}, such as {names[0]}",
                expected="none",
            )
    return model.eval()


def _inputs(
    rows: list[Any], images_root: Path, tokenizer: Any, image_processor: Any
) -> dict[str, torch.Tensor]:
    """The questions of some rows as transformers' processor would prepare them, padded on the left."""
    images = [Image.open(images_root / path) for row in rows for path in row["images"]]
    vision = image_processor(images=images, return_tensors="pt")
    num_tokens = iter((vision["image_grid_thw"].prod(-1) // image_processor.merge_size**2).tolist())
    texts = []
    for row in rows:
        text = tokenizer.apply_chat_template(_question(row), tokenize=False, add_generation_prompt=True)
        before, *others = text.split("<|image_pad|>")
        texts.append(before + "".join("<|image_pad|>" * next(num_tokens) + other for other in others))
    tokens = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    is_image = tokens["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {**tokens, **vision, "mm_token_type_ids": is_image.int()}


def _question(row: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages but the last, with ``<image>`` tags as the content parts that chat templates know."""
    messages = []
    for message in row["messages"][:-1]:
        before, *others = message["content"].split("<image>")
        parts: list[dict[str, str]] = [{"type": "text", "text": before}] if before else []
        for text in others:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        messages.append({"role": message["role"], "content": parts})
    return messages


def _score(rows: list[Any], answers: list[str]) -> Score:
    right, samples = 0, []
    for row, given in zip(rows, answers, strict=True):
        question, expected = row["messages"][-2]["content"], row["messages"][-1]["content"]
        right += given == expected
        verdict = "right" if given == expected else f"wrong: {expected}"
        samples.append(f"{row['images'][0]}  {question.replace('<image>', '')}  {given}  ({verdict})")
    return Score(right, len(rows), tuple(samples[:_NUM_SAMPLES]))
