"""The demo's tokenizer: byte-level BPE as Qwen's, 512 tokens, trained on the few sentences below."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from landfall.demo.digits import QUESTIONS

VOCAB_SIZE = 512
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's own, at the end of the vocabulary as Qwen has them."""

_PROSE = """
system user assistant image video digit number
A ship makes landfall when it comes to land after a voyage. Whatever was aboard is safe from then on, and
whatever is still at sea can be lost. Training a model is such a voyage: it takes days, it costs a lot, and
what was learnt on the way exists only in the memory of the machines until it has been written down. A
checkpoint is the landfall. When the harbour is missing, when the disk is full, when one machine of many stops
answering, the voyage was for nothing.
The handwritten digits in these pictures were collected from forty-three people who filled in a form. Each
picture has eight rows and eight columns, and every dot has a shade between zero and sixteen. The question is
always the same: which digit is written here? The answer is one figure of 0 1 2 3 4 5 6 7 8 9.
Zero, one, two, three, four, five, six, seven, eight and nine are the words for them.
A small model sees the picture as sixteen patches, merges every four of them into one, and reads four words
of a language that nobody speaks. After a few hundred steps it knows a seven from a one nearly every time.
"""

CHAT_TEMPLATE = """\
{%- set images = namespace(count=0) %}
{%- set videos = namespace(count=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {%- set images.count = images.count + 1 %}
                {%- if add_vision_id %}{{- 'Picture ' ~ images.count ~ ': ' }}{%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {%- set videos.count = videos.count + 1 %}
                {%- if add_vision_id %}{{- 'Video ' ~ videos.count ~ ': ' }}{%- endif %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, no default system message; an image part becomes one pad between its markers, as in Qwen3-VL."""


def build_tokenizer() -> Qwen2Tokenizer:
    """Train the tokenizer; the same every time. Token ids below VOCAB_SIZE, the special tokens last."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*QUESTIONS, *_PROSE.split("\n")], trainer)
    trained = json.loads(bpe.to_str())["model"]
    special = {token: len(trained["vocab"]) + number for number, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2Tokenizer(
        vocab=trained["vocab"] | special,
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )
