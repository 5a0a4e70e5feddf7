"""What all tests share: a quiet, small environment, for this process and for every rank it starts."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's store writes a C++ stack for every rank that a test kills.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# It also looks up the name of whoever connects: a name server that drops a question costs 1 s, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
# Tests choose their ranks; those of a surrounding torchrun are not for them.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
