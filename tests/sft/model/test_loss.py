from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from landfall.sft.model.loss import VocabShard, fused_losses, plain_losses
from landfall.testing.procs import run_ranks
from tests.sft.model import tiny
from tests.sft.model.peak import peak_bytes

Losses = Callable[[Tensor, Tensor, Tensor, VocabShard], Tensor]
SMALL_CHUNKS: Losses = partial(fused_losses, chunk_bytes=7 * 4 * 384)  # 7 tokens of 384 rows


def case(num_tokens: int = 33, num_rows: int = 384, vocab: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 48, generator=draw).requires_grad_()
    weight = torch.nn.Parameter(0.2 * torch.randn(num_rows, 48, generator=draw))
    return hidden, weight, torch.randint(0, vocab, (num_tokens,), generator=draw)


def whole(num_tokens: int = 300) -> VocabShard:
    return VocabShard(0, num_tokens, parallel_state.get_tensor_model_parallel_group())


def gradients(losses: Losses, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = case()
    each = losses(hidden, weight, labels, whole())
    (each * scale).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return each.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("losses", [plain_losses, fused_losses, SMALL_CHUNKS], ids=["plain", "one", "chunks"])
def test_losses_and_gradients_equal_torchs_over_real_tokens_only(losses: Losses) -> None:
    hidden, weight, labels = case()
    expected = cross_entropy(linear(hidden, weight[:300]), labels, reduction="none")
    scale = torch.linspace(-1, 2, len(labels))
    (expected * scale).sum().backward()
    each, of_hidden, of_weight = gradients(losses, scale)
    torch.testing.assert_close(each, expected.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_weight, weight.grad, rtol=1e-5, atol=1e-6)
    assert not of_weight[300:].any()


def test_fused_weight_gradient_goes_into_the_optimizers_buffer() -> None:
    hidden, weight, labels = case()
    weight.main_grad = torch.ones_like(weight)
    SMALL_CHUNKS(hidden, weight, labels, whole()).sum().backward()
    _, _, expected = gradients(plain_losses, torch.ones(()))
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-4, atol=1e-5)
    assert weight.grad is not None and not weight.grad.any()


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels = case()
    weight.requires_grad_(False)
    SMALL_CHUNKS(hidden, weight, labels, whole()).sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.any()


@pytest.mark.parametrize("losses", [plain_losses, fused_losses])
def test_no_labelled_token_gives_zero_gradients(losses: Losses) -> None:
    hidden, weight, labels = case()
    empty = losses(hidden[:0], weight, labels[:0], whole())
    empty.sum().backward()
    assert empty.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_fused_loss_never_holds_all_logits() -> None:
    hidden, weight, labels = case(num_tokens=256, num_rows=16384, vocab=16384)
    weight.main_grad = torch.zeros_like(weight)
    shard, all_logits = whole(16384), 256 * 16384 * 4

    def run(losses: Losses) -> int:
        return peak_bytes(lambda: losses(hidden, weight, labels, shard).sum().backward())

    assert run(plain_losses) >= all_logits
    assert run(partial(fused_losses, chunk_bytes=all_logits // 16)) < all_logits // 2


def losses_of_a_shard(losses: Losses, options: object) -> tuple[Tensor, Tensor, Tensor]:
    tiny.join(options)
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, labels = case()
    rows = 384 // group.size()
    first = group.rank() * rows
    shard = VocabShard(first, max(0, min(rows, 300 - first)), group)
    part = torch.nn.Parameter(weight[first : first + rows].detach().clone())
    each = losses(hidden, part, labels, shard)
    each.sum().backward()
    return each.detach(), hidden.grad, part.grad


@pytest.mark.parametrize("losses", [plain_losses, SMALL_CHUNKS], ids=["plain", "chunks"])
def test_vocabulary_split_over_ranks_gives_the_same_losses(losses: Losses) -> None:
    """Of four ranks the last holds padding rows only."""
    options = tiny.ModelOptions(tensor_model_parallel_size=4)
    results = run_ranks(losses_of_a_shard, 4, losses, options)
    each, of_hidden, of_weight = gradients(plain_losses, torch.ones(()))
    for ours, _, _ in results:
        torch.testing.assert_close(ours, each, rtol=0, atol=2e-6)
    torch.testing.assert_close(sum(h for _, h, _ in results), of_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([w for _, _, w in results]), of_weight, rtol=1e-4, atol=1e-5)
