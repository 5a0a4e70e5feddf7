"""Tokens and labels of a conversation, against transformers' own processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from landfall.sft.data.dataset import prepare
from landfall.sft.data.processor import Processor
from landfall.sft.data.rows import parse_row
from landfall.sft.data.template import Encoded, encode
from tests.sft.data.conftest import chat

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)
ANSWER = TEXT.filter(lambda text: "\n" not in text[: len(text) - len(text.lstrip())])
TURNS = st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=3)


class _NoVideo(BaseVideoProcessor):
    """The video processor needs torchvision; images go without."""

    def __init__(self) -> None:
        pass


class _ImageProcessorOnly(Qwen3VLProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@pytest.fixture(scope="module")
def transformers_processor(processor: Processor, model_folder: Path) -> Qwen3VLProcessor:
    images = Qwen2VLImageProcessorPil.from_pretrained(model_folder)
    template = processor.tokenizer.chat_template
    return _ImageProcessorOnly(images, processor.tokenizer, _NoVideo(), chat_template=template)


def _decoded(encoded: Encoded, processor: Processor) -> list[str]:
    """The stretches of text that are trained on."""
    stretches: list[list[int]] = [[]]
    for token, trained in zip(encoded.input_ids, encoded.trained, strict=True):
        if trained:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [processor.tokenizer.decode(stretch) for stretch in stretches if stretch]


def _encode(row: Any, processor: Processor) -> Encoded:
    return encode(parse_row(row), processor)


@given(turns=TURNS, system=st.none() | TEXT)
@settings(max_examples=150, deadline=None)
def test_any_text_conversation_has_the_tokens_of_transformers(
    processor: Processor, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    expected = processor.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    newline = processor.encode("\n")
    assert _encode({"messages": messages}, processor).input_ids + newline == expected


@pytest.mark.parametrize("sizes", [[(64, 64)], [(640, 480)], [(100, 300), (640, 480), (33, 65)]])
def test_row_with_images_has_the_tokens_and_pixels_of_transformers(
    processor: Processor,
    transformers_processor: Qwen3VLProcessor,
    image: Callable[..., Path],
    jsonl: Callable[..., str],
    config: Callable[..., Any],
    sizes: list[tuple[int, int]],
) -> None:
    paths = [str(image(f"{width}x{height}.png", width, height)) for width, height in sizes]
    question = " then ".join(["<image>"] * len(paths)) + " what is this?"
    data = jsonl([chat(question, "a cat", images=paths)])
    got = prepare(config(data), processor).train[0]

    parts: list[dict[str, str]] = []
    for path in paths:
        parts += [{"type": "text", "text": " then "}] if parts else []
        parts.append({"type": "image", "path": path})
    parts.append({"type": "text", "text": " what is this?"})
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    expected = transformers_processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert got.input_ids.tolist() == expected["input_ids"][0].tolist()[:-1]  # less the newline at the end
    assert got.grid_thw is not None and got.pixel_values is not None
    assert got.grid_thw.tolist() == expected["image_grid_thw"].tolist()
    assert got.pixel_values.equal(expected["pixel_values"])


def test_answers_and_their_end_are_trained_on_and_nothing_else(processor: Processor) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a cat?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "a dog?"},
            {"role": "assistant", "content": "no"},
        ]
    }
    encoded = _encode(row, processor)
    assert _decoded(encoded, processor) == ["yes<|im_end|>", "no<|im_end|>"]
    assert processor.tokenizer.decode(encoded.input_ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na cat?<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\na dog?<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>"
    )


def test_row_without_system_message_gets_none(processor: Processor) -> None:
    text = processor.tokenizer.decode(_encode(chat("hi", "ho"), processor).input_ids)
    assert text.startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("first", "second", "trained"),
    [
        (False, None, ["no<|im_end|>"]),
        (False, True, ["no<|im_end|>"]),
        (None, False, ["yes<|im_end|>"]),
        (True, True, ["yes<|im_end|>", "no<|im_end|>"]),
    ],
)
def test_answer_with_loss_false_is_not_trained_on(
    processor: Processor, first: bool | None, second: bool | None, trained: list[str]
) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "a cat?"},
            {"role": "assistant", "content": "yes", "loss": first},
            {"role": "user", "content": "a dog?", "loss": True},
            {"role": "assistant", "content": "no", "loss": second},
        ]
    }
    assert _decoded(_encode(row, processor), processor) == trained


def test_image_in_an_answer_is_not_trained_on(processor: Processor) -> None:
    encoded = _encode(chat("draw", "look: <image> nice", images=["a.png"]), processor)
    assert _decoded(encoded, processor) == ["look: ", " nice<|im_end|>"]


def test_answer_that_starts_with_a_newline_keeps_the_prompt_of_inference(processor: Processor) -> None:
    encoded = _encode(chat("hi", "\nho"), processor)
    prompt = processor.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.trained == [False] * len(prompt) + [True] * (len(encoded.trained) - len(prompt))
    assert _decoded(encoded, processor) == ["\nho<|im_end|>"]
