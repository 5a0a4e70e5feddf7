from __future__ import annotations

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from landfall.sft.model.rotary import InterleavedRotary, rotate
from tests.sft.model import tiny

POSITIONS = torch.randint(0, 3000, (3, 17), generator=torch.Generator().manual_seed(0))


def test_rotated_heads_equal_transformers() -> None:
    theirs = Qwen3VLTextRotaryEmbedding(tiny.config().text_config)
    ours = InterleavedRotary(32, 1e4, [8, 4, 4])
    query = torch.randn(17, 1, 4, 32)
    cos, sin = theirs(query, POSITIONS[:, None])
    expected, _ = apply_rotary_pos_emb(query.permute(1, 2, 0, 3), query.permute(1, 2, 0, 3), cos, sin)
    rotated = rotate(query, ours(POSITIONS, torch.float32))
    torch.testing.assert_close(rotated, expected.permute(2, 0, 1, 3), rtol=1e-6, atol=1e-6)


def test_rotation_has_its_own_gradient() -> None:
    angles = InterleavedRotary(8, 1e4, [2, 1, 1])(POSITIONS, torch.float64)
    query = torch.randn(17, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, angles), (query,))


def test_axes_take_turns_until_their_section_ends() -> None:
    assert InterleavedRotary(16, 1e4, [4, 2, 2]).axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_angles_of_far_positions_are_exact_in_a_bf16_model() -> None:
    rotary = InterleavedRotary(32, 5e6, [8, 4, 4]).bfloat16()
    far = torch.full((3, 1), 200_003)
    exact = InterleavedRotary(32, 5e6, [8, 4, 4])(far, torch.float32)
    assert torch.equal(rotary(far, torch.float32).cos, exact.cos)
