"""The anchor for the trainer's speed: plain transformers on the model and the rows of bench/big_model.py.

usage: python bench/transformers_anchor.py FOLDER [--rows 8] [--steps 4]
Full fine-tuning as people do it by hand: fp32 weights under bf16 autocast, gradient checkpointing, fused AdamW,
gradient clipping; rows of 2,048 tokens of which 1,600 are an image. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from reported_run import PEAK_FLOPS, model_flops
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

ROW, IMAGE = 2048, 1600


def batch(config: Qwen3VLConfig, num_rows: int) -> dict[str, torch.Tensor]:
    """Random rows on the device; the answer's tokens have labels."""
    ids = torch.randint(300, 150_000, (num_rows, ROW), device="cuda")
    ids[:, 10], ids[:, 11 + IMAGE] = config.vision_start_token_id, config.vision_end_token_id
    ids[:, 11 : 11 + IMAGE] = config.image_token_id
    labels = ids.clone()
    labels[:, : 12 + IMAGE] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.randn(num_rows * IMAGE * 4, 3 * 2 * 16 * 16, device="cuda"),
        "image_grid_thw": torch.tensor([[1, 80, 80]] * num_rows, device="cuda"),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    config = Qwen3VLConfig.from_pretrained(arguments.folder / "model")
    with torch.device("cuda"):
        model = Qwen3VLForConditionalGeneration._from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    inputs = batch(config, arguments.rows)
    for step in range(arguments.steps + 2):
        if step == 2:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    tokens_per_s = arguments.steps * arguments.rows * ROW / (time.perf_counter() - started)
    flops = model_flops(tokens_per_s, tokens_per_s / ROW, config.text_config.num_hidden_layers)
    found = {
        "rows": arguments.rows,
        "tokens_per_s": round(tokens_per_s),
        "MFU": round(flops / PEAK_FLOPS, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    print(json.dumps({"plain transformers": found}))


if __name__ == "__main__":
    main()
