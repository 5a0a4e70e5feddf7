"""Image files: their size in tokens from the header alone, and their pixels as patches."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from landfall.errors import DataError, UsageError

DEFAULT_MAX_TOKENS = 16384
"""Tokens that one image may become when IMAGE_MAX_TOKEN_NUM is not set."""

UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow raises for files that are missing, cut short, or no images."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_JPEG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class ImageHeader:
    """What is known of an image file before its pixels are read."""

    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width after resizing."""
    num_bytes: int
    mtime_ns: int


class ImageReader:
    """Reads image files as the model's own processor does. Picklable."""

    def __init__(self, processor: Qwen2VLImageProcessorPil, max_tokens: int | None) -> None:
        """``max_tokens`` bounds the tokens of one image (IMAGE_MAX_TOKEN_NUM)."""
        if max_tokens is not None and max_tokens < 1:
            raise UsageError("IMAGE_MAX_TOKEN_NUM must be at least 1", got=str(max_tokens))
        self.processor = processor
        self.patch_size, self.merge_size = int(processor.patch_size), int(processor.merge_size)
        self.max_pixels = (max_tokens or DEFAULT_MAX_TOKENS) * (self.patch_size * self.merge_size) ** 2
        self.min_pixels = min(int(processor.size["shortest_edge"]), self.max_pixels)
        processor.size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}

    @classmethod
    def from_folder(cls, folder: Path, max_tokens: int | None) -> ImageReader:
        try:
            processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        except OSError as error:
            raise UsageError(
                "The model folder has no image processor",
                where=str(folder),
                expected="preprocessor_config.json or processor_config.json",
                do="copy it from the model's repository",
            ) from error
        return cls(processor, max_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """What the number of tokens of an image depends on."""
        names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
        return {name: getattr(self, name) for name in names}

    def num_tokens(self, grid_thw: Sequence[int]) -> int:
        time, height, width = grid_thw
        return time * height * width // self.merge_size**2

    def header(self, path: str) -> ImageHeader:
        """Grid from the header, after a check that the file is whole. Raises one of UNREADABLE."""
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            with Image.open(file) as image:
                width, height = _upright_size(image)
                is_jpeg = image.format == "JPEG"
                image.verify()
            if is_jpeg:
                _check_jpeg_is_whole(path)
        factor = self.patch_size * self.merge_size
        rows, columns = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        grid_thw = (1, rows // self.patch_size, columns // self.patch_size)
        return ImageHeader(grid_thw, stat.st_size, stat.st_mtime_ns)

    def pixels(self, paths: Sequence[str], grid_thw: NDArray[np.int64], source: str) -> Tensor:
        """The patches [P, C] float32 of images whose headers gave ``grid_thw`` [n, 3].

        Raises DataError naming ``source`` if a file can't be read any more or has become another size.
        """
        images = [_read(path, source) for path in paths]
        patches = self.processor(images=images, return_tensors="pt")
        if patches["image_grid_thw"].tolist() != grid_thw.tolist():
            raise DataError(
                "An image has changed since the rows were read",
                where=source,
                got=f"grids {patches['image_grid_thw'].tolist()} of {', '.join(paths)}",
                expected=f"grids {grid_thw.tolist()}",
                do="leave images alone while training runs; start again to read them anew",
            )
        return patches["pixel_values"].to(torch.float32)


def _read(path: str, source: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            turn = _TURNS.get(_orientation(image))
            image.load()
            return _on_white(image.transpose(turn) if turn is not None else image.copy())
    except UNREADABLE as error:
        raise DataError(
            "An image can't be read",
            where=f"{source}: {path}",
            got=f"{type(error).__name__}: {error}",
            do="mend or remove the row; it was readable when the rows were read before training",
        ) from error


def _on_white(image: Image.Image) -> Image.Image:
    """RGB; what shows through is white, as in transformers from 5.24 on (before, it was black)."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation as far as the header holds it (a PNG may hide it behind its pixels)."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) >= 5 else (width, height)


def _check_jpeg_is_whole(path: str) -> None:
    """Pillow's verify does not see a JPEG that is cut short; such a file lacks its end marker."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _JPEG_TAIL_BYTES))
        if b"\xff\xd9" in file.read():
            return
    with Image.open(path) as image:
        image.load()
