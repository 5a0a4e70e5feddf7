"""The demo's model: a Qwen3-VL of 1.2 million parameters with random weights, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from landfall.demo.digits import PICTURE_SIDE
from landfall.demo.progress import without_progress_bars
from landfall.demo.tokenizer import VOCAB_SIZE, build_tokenizer

_SEED = 20


def write_model(folder: Path) -> None:
    """Write weights (bf16, for --bf16 true), configs, tokenizer and image processor; the same every time."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = Qwen3VLForConditionalGeneration(_config(tokenizer.get_vocab())).to(torch.bfloat16)
    end = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=end[1])
    with without_progress_bars():
        model.save_pretrained(folder)
    # Inside tokenizer_config.json, where Qwen's own folders have it.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _image_processor().save_pretrained(folder)


def _config(token_ids: dict[str, int]) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config=dict(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            rope_parameters=dict(
                rope_type="default", rope_theta=10_000.0, mrope_section=[8, 4, 4], mrope_interleaved=True
            ),
        ),
        vision_config=dict(
            depth=3,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            out_hidden_size=128,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def _image_processor() -> Qwen2VLImageProcessorPil:
    pixels = PICTURE_SIDE * PICTURE_SIDE
    return Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": pixels, "longest_edge": 16384 * 32 * 32},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
