"""The demo's sft.sh: the recipe with other values at its top, and nothing else changed."""

from __future__ import annotations

from importlib.resources import files

_ROWS_PER_STEP = 32


def recipe() -> str:
    """The script for a real model: the same text as recipes/qwen3_vl_sft.sh."""
    return files("landfall.demo").joinpath("qwen3_vl_sft.sh").read_text(encoding="utf-8")


def demo_script(ranks: int, output: str) -> str:
    """The recipe for a demo folder, in which it must lie; checkpoints go to its subfolder ``output``.

    Every changed value says in a comment why, and still yields to the environment.
    """
    rows_per_rank = -(-_ROWS_PER_STEP // ranks)
    here = '$(dirname "$0")'
    changes = {
        "MODEL": (f"{here}/model", "1.2 million parameters, not 4 billion"),
        "SFT_DATASET": (f"{here}/data/train.jsonl", "1,497 handwritten digits"),
        "SFT_DIR": (f"{here}/{output}", "not only ASCII, as in the report"),
        "NPROC_PER_NODE": (f"{ranks}", "processes on the CPU, or as many GPUs; the report had 8"),
        "MICRO_BATCH_SIZE": (f"{rows_per_rank}", "one micro batch a step; the report had 16"),
        "GLOBAL_BATCH_SIZE": (f"{rows_per_rank * ranks}", "few rows, so small steps; the report had 128"),
        "LR": ("1.5e-3", "from random weights; 1e-5 is for fine-tuning a trained model"),
        "MAX_EPOCHS": ("10", "enough to learn the digits; the report had 1"),
        "SAVE_INTERVAL": ("200", "to see saves on the way; the report had 10000"),
        "EVAL_INTERVAL": ("200", "as often as it saves; the report had 10000"),
        "NUM_WORKERS": ("0", "small pictures on a small machine; the report had 4"),
        "DATASET_NUM_PROC": ("1", "few rows; the report had 8"),
    }
    lines = []
    for line in recipe().splitlines():
        name = line.partition("=")[0]
        if name in changes:
            value, reason = changes.pop(name)
            line = f"{name}=${{{name}:-{value}}}  # {reason}"
        lines.append(line)
    assert not changes, f"the recipe does not set {', '.join(changes)}"
    return "\n".join(lines) + "\n"
