"""Imported once by the fork server of :mod:`landfall.testing.procs`, so that ranks start at once.

It must start no thread: a thread does not survive the fork, and what it held stays locked.
"""

import os
import warnings
from importlib import import_module

os.environ["OMP_NUM_THREADS"] = "1"  # OpenBLAS would start its threads on import
os.environ["TOKENIZERS_PARALLELISM"] = "false"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core's, for want of TransformerEngine and Apex
    for name in (
        "torch.distributed.checkpoint",
        "megatron.core.dist_checkpointing.strategies.torch",
        "megatron.core.models.gpt",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
    ):
        import_module(name)
