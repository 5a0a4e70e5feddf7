"""Look at a ``torch.save`` archive before torch does: nothing compressed, nothing twice, nothing outside."""

from __future__ import annotations

import zipfile
from typing import IO

from landfall.errors import HostileFileError
from landfall.format.pickle_check import check_pickle

LIMIT_ENTRIES = 1 << 20


def open_archive(file: IO[bytes], length: int, place: str) -> zipfile.ZipFile:
    """The archive in ``file`` of ``length`` bytes; zipfile.BadZipFile if it is none.

    Raises HostileFileError where an entry is compressed (``torch.save`` never does that, zip bombs do),
    longer than the archive, there twice, or called by a name that leaves a folder.
    """
    archive = zipfile.ZipFile(file)
    names = set()
    for count, entry in enumerate(archive.infolist()):
        fault = _fault(entry, length)
        if entry.filename in names:
            fault = "is there twice"
        if count >= LIMIT_ENTRIES:
            fault = "is one too many"
        if fault:
            raise HostileFileError(
                "An archive is not one that torch.save writes",
                where=place,
                got=f"the entry {entry.filename[:200]!r} {fault}",
                do="do not load this checkpoint",
            )
        names.add(entry.filename)
    return archive


def check_archive(file: IO[bytes], length: int, place: str) -> None:
    """The same, and its pickles are looked at."""
    with open_archive(file, length, place) as archive:
        for name in archive.namelist():
            if name.endswith(".pkl"):
                check_pickle(archive.read(name), f"{place}, {name}")


def _fault(entry: zipfile.ZipInfo, length: int) -> str:
    parts = entry.filename.split("/")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        return "is compressed"
    if entry.file_size > length or entry.header_offset > length:
        return f"claims {entry.file_size:,} bytes, the archive has {length:,}"
    if ".." in parts or entry.filename.startswith("/") or "\\" in entry.filename:
        return "leaves its folder"
    return ""
