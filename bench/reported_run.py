"""The reported run on one GPU: train a Qwen3-VL-4B, evaluate, fill the card, save, verify, export, kill, resume.

usage: python bench/reported_run.py FOLDER [--layers 36] [--optimizer] [--steps 8] [--out OUT]
FOLDER holds what bench/big_model.py made. Writes OUT/reported_run.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from watch import Watched, plot, watch

PEAK_FLOPS = 989e12
"""H200, bf16 dense."""
LANDFALL = [sys.executable, "-c", "from landfall.cli.main import run; run()"]


def reported_flags(folder: Path, save: Path, steps: int, micro_batch_size: int, ranks: int) -> list[str]:
    """The reported script's flags; only sizes, paths, steps and intervals are others."""
    return f"""
        --model {folder}/model --model_type qwen3_vl --load_safetensors true --save_safetensors true
        --context_parallel_size 1 --tensor_model_parallel_size 1 --pipeline_model_parallel_size 1
        --dataset {folder}/data/train.jsonl --split_dataset_ratio 0.01 --load_from_cache_file true --bf16 true
        --attention_softmax_in_fp32 true --attention_backend flash --sequence_parallel false --packing false
        --freeze_llm false --freeze_vit false --freeze_aligner false --micro_batch_size {micro_batch_size}
        --global_batch_size {micro_batch_size * ranks} --recompute_granularity full --recompute_method uniform
        --recompute_num_layers 1 --cross_entropy_loss_fusion true --train_type full --lr 1e-5
        --lr_warmup_fraction 0.05 --min_lr 1e-8 --train_iters {steps} --clip_grad 1.0 --save {save}
        --save_interval {steps // 2} --eval_interval {steps // 2} --vit_gradient_checkpointing true
        --max_length 4096 --num_workers 4 --dataset_num_proc 8 --log_interval 1""".split()


def train(
    arguments: argparse.Namespace, flags: list[str], ranks: int, *, fill: bool, kill_after: str = ""
) -> Watched:
    """One run of ``landfall sft``; fills the card once training is under way, kills it after a line if asked."""
    filler: list[subprocess.Popen[bytes]] = []

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        if fill and not filler and re.search(r"step 3/", line):
            filler.append(subprocess.Popen([sys.executable, str(Path(__file__).with_name("fill_card.py"))]))
        if kill_after and re.search(kill_after, line):
            for child in reversed(_family(process.pid)):
                os.kill(child, signal.SIGKILL)

    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "IMAGE_MAX_TOKEN_NUM": "1600"}
    if ranks > 1:
        environment["NPROC_PER_NODE"] = str(ranks)
    try:
        return watch([*LANDFALL, "sft", *flags], environment, on_line)
    finally:
        for process in filler:
            process.kill()


def _family(pid: int) -> list[int]:
    import psutil

    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def entries(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "logging.jsonl").read_text().splitlines()]


def model_flops(num_tokens: float, num_rows: float, layers: int) -> float:
    """6 x parameters x tokens for both towers and the causal half of attention (facts: as the anchor counts)."""
    language, vision = 4.022e9 * layers / 36 + 0.389e9 * (1 - layers / 36), 0.415e9
    return (
        6 * language * num_tokens + 6 * vision * num_rows * 6400 + 6 * layers * 32 * 128 * num_rows * 2048**2
    )


def check_export(checkpoint: Path) -> str:
    from transformers import Qwen3VLForConditionalGeneration

    started = time.monotonic()
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    num_parameters = sum(p.numel() for p in model.parameters())
    return (
        f"from_pretrained: {num_parameters:,} parameters, missing {sorted(info['missing_keys'])}, unexpected "
        f"{sorted(info['unexpected_keys'])}, all finite: {finite}, {time.monotonic() - started:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument(
        "--optimizer", action="store_true", help="save the optimizer, kill the run, resume it"
    )
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    save = arguments.folder / "输出"
    flags = reported_flags(
        arguments.folder, save, arguments.steps, arguments.micro_batch_size, arguments.ranks
    )
    rest = [] if arguments.optimizer else ["--no_save_optim", "true", "--no_save_rng", "true"]
    first = train(arguments, [*flags, *rest, "--finetune", "true"], arguments.ranks, fill=True)
    run_folder = sorted(save.glob("v*"))[-1]
    log = [entry for entry in entries(run_folder) if "loss" in entry]
    checkpoint = run_folder / f"checkpoint-{arguments.steps}"
    report: dict[str, Any] = {"exit code": first.code, "log": entries(run_folder)}
    steady = log[2 : arguments.steps // 2]
    tokens_per_s = sum(e["tokens_per_s"] for e in steady) / len(steady)
    flops = model_flops(tokens_per_s, tokens_per_s / 2048, arguments.layers)
    report["speed"] = (
        f"{tokens_per_s:,.0f} tokens/s, MFU {flops / PEAK_FLOPS:.1%}, peak {log[-1]['memory(GiB)']} GiB"
    )
    report["saved"] = [line for line in first.lines if line.startswith("saved ") or "NOT SAVED" in line]
    verified = subprocess.run([*LANDFALL, "verify", str(checkpoint)], capture_output=True, text=True)
    report["verify"] = verified.stdout.strip() + verified.stderr.strip()
    report["export"] = check_export(checkpoint)
    runs = {f"{arguments.ranks} rank(s), {arguments.layers} layers": first}
    if arguments.optimizer:
        middle = run_folder / f"checkpoint-{arguments.steps // 2}"
        resume = [*flags, "--finetune", "false", "--load", str(middle)]
        killed = train(
            arguments, resume, arguments.ranks, fill=False, kill_after=rf"step {arguments.steps - 1}/"
        )
        again = train(arguments, resume, arguments.ranks, fill=False)
        resumed = [e for e in entries(sorted(save.glob("v*"))[-1]) if "loss" in e]
        same = all(a["loss"] == b["loss"] for a, b in zip(log[arguments.steps // 2 :], resumed, strict=False))
        report["kill and resume"] = (
            f"killed with exit code {killed.code}; resumed from {middle.name} with exit code {again.code}; "
            f"losses {[e['loss'] for e in resumed]}, undisturbed {[e['loss'] for e in log[arguments.steps // 2 :]]}, "
            f"bit for bit the same: {same}"
        )
    name = arguments.out / f"reported_run_{arguments.layers}_layers_{arguments.ranks}_ranks"
    plot(runs, name.with_suffix(".png"), "The reported run on one GPU")
    name.with_suffix(".json").write_text(json.dumps(report, indent=1))
    print(
        json.dumps(
            {key: value for key, value in report.items() if key != "log"}, indent=1, ensure_ascii=False
        )
    )


if __name__ == "__main__":
    main()
