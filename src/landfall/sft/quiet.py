"""The frameworks' running commentary, kept out of the progress. Their errors still show."""

from __future__ import annotations

import logging
import os
import warnings

_TELLS_NOTHING = (
    "Transformer Engine and Apex are not installed",  # what we use instead is documented
    "Apex is not installed",
    "`gradient_checkpointing_enable` is deprecated",
    "If you are using transformer_engine as the transformer implementation",
    "full scope is deprecated",
)


def quieten() -> None:
    """Call before megatron-core is imported: it warns while it loads."""
    for message in _TELLS_NOTHING:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*|megatron\..*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("megatron", "torch.distributed", "transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
