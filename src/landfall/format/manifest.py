"""``landfall.json``: the file whose replacement is the one commit of a save.

A checkpoint exists when its manifest does, and consists of what the manifest's indexes name. A file whose
name is fixed by other readers (``model.safetensors``, ``.metadata``) is written under a staged name that
carries the save_id and published by renaming just before the commit; while two generations meet in one
folder, :func:`where` finds the right one.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from landfall.errors import DamagedError, HostileFileError
from landfall.format.index import digest
from landfall.format.names import check_name

NAME = "landfall.json"
FORMAT_VERSION = 1
LIMIT_BYTES = 64 << 20


_SAVE_ID = re.compile(r"lf[a-z0-9]+-\d+")


class Writer(msgspec.Struct, frozen=True):
    """One rank's index file and its xxh3-128 in hexadecimal."""

    rank: int
    index: str
    digest: str
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What was saved, by whom, and which index files say where it lies."""

    save_id: str
    step: int
    created: str
    world_size: int
    writers: list[Writer]
    published: list[str]
    """Names fixed by other readers; everything else carries the save_id in its name."""
    content: dict[str, Any]
    """For people and tools: counts, sizes, formats, notes."""
    landfall: str
    format_version: int = FORMAT_VERSION
    digest: str = ""
    """xxh3-128 of this file with ``digest`` empty."""

    def encode(self) -> bytes:
        """The file's bytes, its own digest filled in."""
        sealed = msgspec.structs.replace(self, digest=digest(_plain(self)).hex())
        return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"

    @property
    def num_bytes(self) -> int:
        return sum(writer.num_bytes for writer in self.writers)


def decode_manifest(data: bytes, place: str) -> Manifest:
    """Read and check a manifest; raises DamagedError for anything but one that landfall wrote."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError("The manifest can't be read", where=place, got=str(error)) from error
    if manifest.format_version != FORMAT_VERSION:
        raise DamagedError(
            "The manifest has another format",
            where=place,
            got=f"version {manifest.format_version}",
            expected=f"version {FORMAT_VERSION}",
            do="read it with the landfall release that wrote it (see its 'landfall' field)",
        )
    for name in [writer.index for writer in manifest.writers] + manifest.published:
        check_name(name, place)
    if not _SAVE_ID.fullmatch(manifest.save_id):
        raise HostileFileError(
            "The manifest has a save_id that is none", where=place, got=repr(manifest.save_id[:100])
        )
    found = digest(_plain(manifest)).hex()
    if found != manifest.digest:
        raise DamagedError(
            "The manifest was changed after it was written",
            where=place,
            got=f"digest {found}",
            expected=manifest.digest,
        )
    return manifest


def staged_name(name: str, save_id: str) -> str:
    """Where a file of a fixed name lies before it is published, and while a newer one replaces it."""
    return f"{name}.{save_id}"


def _plain(manifest: Manifest) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(manifest, digest=""), order="deterministic")
