"""A tiny Qwen3-VL processor folder, image files and jsonl files, all real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from landfall.sft.data.dataset import DataConfig
from landfall.sft.data.processor import Processor

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
"""


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(
        ["user\nassistant\nsystem\n what is in this picture? a cat and a dog\n\n"] * 9, trainer
    )
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and image processor as they lie in a model's repository; images of 4 tokens and more."""
    folder = tmp_path_factory.mktemp("model")
    _tokenizer().save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def processor(model_folder: Path) -> Processor:
    return Processor.from_folder(model_folder)


@pytest.fixture
def image(tmp_path: Path) -> Callable[..., Path]:
    """``image(name, width, height)`` writes an image of noise and returns its path."""

    def write(name: str, width: int, height: int) -> Path:
        noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(path)
        return path

    return write


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """``jsonl(rows, name)`` writes rows, each a line, and returns the path; text is written as it is."""

    def write(rows: Iterable[Any], name: str = "train.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    def build(*dataset: str, **options: Any) -> DataConfig:
        return DataConfig(dataset=dataset, cache_dir=str(tmp_path / "cache"), **options)

    return build


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A row of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}
