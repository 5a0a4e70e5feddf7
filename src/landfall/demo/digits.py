"""The demo's data: scikit-learn's handwritten digits as pictures with a question and its answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

QUESTIONS = ("Which digit is this?", "What number is written here?", "Read the handwritten digit.")
NUM_TEST_ROWS = 300
PICTURE_SIDE = 64
"""Pixels. Four tokens a picture: one for every 32 x 32 pixels."""

_SEED = 20


def write_digits(folder: Path) -> None:
    """Write ``folder``/images/*.png, train.jsonl (1,497 rows) and test.jsonl (300 others).

    The same every time. A row has ``messages`` and ``images``, whose paths are relative to the jsonl file.
    """
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    rows = [
        _row(folder, number, digits.images[number], int(label)) for number, label in enumerate(digits.target)
    ]
    order = np.random.default_rng(_SEED).permutation(len(rows))
    _write_rows(folder / "test.jsonl", [rows[number] for number in order[:NUM_TEST_ROWS]])
    _write_rows(folder / "train.jsonl", [rows[number] for number in order[NUM_TEST_ROWS:]])


def _row(folder: Path, number: int, shades: np.ndarray, label: int) -> dict[str, object]:
    """Write the picture of ``shades`` ([8, 8], 0 to 16) and return its row."""
    name = f"images/{number:04d}.png"
    small = Image.fromarray((shades / 16 * 255).astype(np.uint8))
    small.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BICUBIC).save(folder / name)
    question = "<image>" + QUESTIONS[number % len(QUESTIONS)]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": str(label)}]
    return {"messages": messages, "images": [name]}


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
