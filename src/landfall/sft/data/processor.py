"""Tokenizer and image reader of a model folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from transformers import AutoTokenizer

from landfall.errors import UsageError
from landfall.sft.data.images import ImageReader

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in the text, before its pad is repeated."""

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


class Processor:
    """Turns text into tokens and image files into patches. Picklable."""

    def __init__(self, tokenizer: Any, images: ImageReader, folder: Path) -> None:
        self.tokenizer, self.images, self.folder = tokenizer, images, folder
        for token in _SPECIAL:
            if len(self.encode(token)) != 1:
                raise UsageError(
                    "The tokenizer is not Qwen3-VL's",
                    where=str(folder),
                    got=f"{token} becomes {len(self.encode(token))} tokens",
                    expected="one token",
                )
        if not self.encode("plain text"):  # transformers makes an empty one where files are missing
            raise UsageError(
                "The tokenizer knows no text",
                where=str(folder),
                expected="the tokenizer's files (tokenizer.json, or vocab.json and merges.txt)",
                do="copy them from the model that the folder was made from",
            )
        self.image_token_id = self.encode("<|image_pad|>")[0]

    @classmethod
    def from_folder(cls, folder: str | Path, image_max_token_num: int | None = None) -> Processor:
        """Of the Hugging Face folder of a Qwen3-VL model; nothing is downloaded.

        ``image_max_token_num`` bounds the tokens of one image: N allows N * (patch * merge)^2 pixels;
        None means 16384. The least number of pixels is the folder's.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UsageError("There is no such model folder", where=str(folder))
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UsageError(
                "The model folder has no usable tokenizer", where=str(folder), got=str(error)
            ) from error
        return cls(tokenizer, ImageReader.from_folder(folder, image_max_token_num), folder)

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``; special tokens written in it count, none is added."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever a row could come out differently."""
        digest = xxhash.xxh3_128(self.tokenizer.backend_tokenizer.to_str().encode())
        digest.update(msgspec.json.encode(self.images.settings))
        return digest.hexdigest()
