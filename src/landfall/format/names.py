"""Names of files as they stand in metadata: inside the checkpoint's folder, or refused."""

from __future__ import annotations

from landfall.errors import HostileFileError


def check_name(name: str, place: str) -> str:
    """``name`` if it is a relative path that stays in its folder; raises HostileFileError otherwise."""
    parts = name.split("/")
    if not name or "" in parts or "." in parts or ".." in parts or "\\" in name or "\0" in name:
        raise HostileFileError(
            "A checkpoint names a file outside of its folder",
            where=place,
            got=repr(name[:200]),
            expected="a relative path without '..'",
            do="do not use this checkpoint: landfall never writes such names",
        )
    return name
