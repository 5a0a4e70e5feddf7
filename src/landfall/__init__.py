"""Supervised fine-tuning of Qwen3-VL on megatron-core, with checkpoints that always land.

For any training loop: ``landfall.save(state_dict, path)``, ``landfall.load(state_dict, path)`` in place,
``landfall.latest(path)`` and ``landfall.verify(path)``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landfall.engine.api import latest, load, save
    from landfall.engine.verify import verify

__version__ = "0.1.0"
__all__ = ["__version__", "latest", "load", "save", "verify"]

_PLACES = {
    "save": "landfall.engine.api",
    "load": "landfall.engine.api",
    "latest": "landfall.engine.api",
    "verify": "landfall.engine.verify",
}
"""Imported when they are first used: ``import landfall`` is quick and needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'landfall' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
