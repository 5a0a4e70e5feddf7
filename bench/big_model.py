"""Make a Qwen3-VL of a real size with random weights, and rows of real photographs to train it on.

usage: python bench/big_model.py FOLDER [--layers 36] [--rows 256]
Writes FOLDER/model (Hugging Face format, bf16) and FOLDER/data/train.jsonl: each row one photograph that
becomes 1,600 image tokens, and text up to 2,048 tokens in all.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from landfall.demo.model import write_model

ROW_TOKENS, IMAGE_TOKENS, SIDE = 2048, 1600, 1280


def config_4b(tiny: Qwen3VLConfig, num_layers: int) -> Qwen3VLConfig:
    """Qwen3-VL-4B's configuration, with the demo tokenizer's ids for the special tokens."""
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "rope_parameters": rope,
            "dtype": "bfloat16",
        },
        vision_config={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        image_token_id=tiny.image_token_id,
        video_token_id=tiny.video_token_id,
        vision_start_token_id=tiny.vision_start_token_id,
        vision_end_token_id=tiny.vision_end_token_id,
        tie_word_embeddings=True,
    )


def make_model(folder: Path, num_layers: int) -> None:
    """The demo's tokenizer and processor, the 4B configuration, random weights."""
    write_model(folder)
    config = config_4b(Qwen3VLConfig.from_pretrained(folder), num_layers)
    (folder / "model.safetensors").unlink()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    print(f"model of {sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


def make_data(folder: Path, model: Path, num_rows: int) -> None:
    """Crops of scikit-learn's two sample photographs, and random words after them."""
    (folder / "images").mkdir(parents=True)
    draw = random.Random(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = ["which", "digit", "is", "this", "number", "written", "here", "read", "the", "handwritten"]
    with open(folder / "train.jsonl", "w", encoding="utf-8") as rows:
        for number in range(num_rows):
            photograph = draw.choice(photographs)
            left, top = draw.randrange(photograph.width - 400), draw.randrange(photograph.height - 400)
            name = f"images/{number:05d}.jpg"
            photograph.crop((left, top, left + 400, top + 400)).resize((SIDE, SIDE)).save(folder / name)
            question = {"role": "user", "content": "<image>What number is written here?"}
            answer = {"role": "assistant", "content": exact_answer(tokenizer, question, words, draw)}
            rows.write(json.dumps({"messages": [question, answer], "images": [name]}) + "\n")


def exact_answer(tokenizer: Any, question: dict[str, str], words: list[str], draw: random.Random) -> str:
    """Random words, as many as make the row ROW_TOKENS long."""
    prompt = (
        f"<|im_start|>user\n{question['content'].removeprefix('<image>')}<|im_end|>\n<|im_start|>assistant\n"
    )
    room = (
        ROW_TOKENS - IMAGE_TOKENS - 2 - len(tokenizer(prompt)["input_ids"]) - 1
    )  # image's brackets, <|im_end|>
    answer = draw.choice(words)
    while (missing := room - len(tokenizer(answer)["input_ids"])) > 0:
        # a digit is a token of its own, so the last few can be made up exactly
        answer += " " + draw.choice(words) if missing > 12 else str(draw.randrange(10))
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", type=int, default=256)
    arguments = parser.parse_args()
    make_model(arguments.folder / "model", arguments.layers)
    make_data(arguments.folder / "data", arguments.folder / "model", arguments.rows)


if __name__ == "__main__":
    main()
