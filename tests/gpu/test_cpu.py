from __future__ import annotations

import sys

import pytest
import torch

from landfall.sft import cpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_install_does_nothing_where_there_is_a_gpu() -> None:
    from megatron.core.optimizer import clip_grads

    finders, code = list(sys.meta_path), clip_grads.clip_grad_by_total_norm_fp32.__code__
    cpu.install()
    assert sys.meta_path == finders
    assert clip_grads.clip_grad_by_total_norm_fp32.__code__ is code and clip_grads.torch is torch
