"""A little real training, split over the data-parallel ranks as Megatron's distributed optimizer does it.

Eight residual layers of 1024 x 1024 in one flat buffer, trained with momentum: gradients are
reduce-scattered, every rank updates the rows that it owns, and the weights are all-gathered. What is saved
afterwards is what came out: 32 MiB of weights that all ranks hold, 32 MiB of momentum split over them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

NUM_LAYERS = 8
WIDTH = 1024
NUM_ROWS = NUM_LAYERS * WIDTH
NUM_STEPS = 3
LR = 200.0
MOMENTUM = 0.9
NUM_BYTES = 2 * NUM_ROWS * WIDTH * 4
"""What a checkpoint holds on any number of ranks that divides the rows."""


class Training:
    """One rank's part. ``layers`` are views of the weights, the same on all ranks; ``momentum`` has the rows
    [rank * rows, (rank + 1) * rows) of the (padded) momentum of all weights."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_own_rows = -(-NUM_ROWS // self.size)
        shape = (self.num_own_rows * self.size, WIDTH)
        generator = torch.Generator().manual_seed(1)
        self._weights = torch.zeros(shape, device=device)
        self._weights[:NUM_ROWS] = (torch.randn(NUM_ROWS, WIDTH, generator=generator) * WIDTH**-0.5).to(
            device
        )
        self._gradients = torch.zeros(shape, device=device)
        self.momentum = torch.zeros(self.num_own_rows, WIDTH, device=device)
        self.layers = {
            f"layers.{i}.weight": _rows(self._weights, i).requires_grad_() for i in range(NUM_LAYERS)
        }
        for number, layer in enumerate(self.layers.values()):
            layer.grad = _rows(self._gradients, number)  # backward() adds to it in place

    def run(self) -> tuple[list[float], float]:
        """Train, then evaluate; returns the mean training losses by step and the evaluation loss."""
        warm_up(self.group, self.device)
        losses = [self._step(number) for number in range(NUM_STEPS)]
        with torch.no_grad():
            evaluation = self._mean(self._loss(NUM_STEPS))
        return losses, evaluation

    def _step(self, number: int) -> float:
        self._gradients.zero_()
        loss = self._loss(number)
        loss.backward()
        own = torch.empty_like(self.momentum)
        dist.reduce_scatter_tensor(own, self._gradients, group=self.group)
        with torch.no_grad():
            self.momentum.mul_(MOMENTUM).add_(own, alpha=1 / self.size)
            rows = slice(self.rank * self.num_own_rows, (self.rank + 1) * self.num_own_rows)
            updated = self._weights[rows] - LR * self.momentum
            dist.all_gather_into_tensor(self._weights, updated, group=self.group)
        return self._mean(loss.detach())

    def _loss(self, number: int) -> Tensor:
        """Of this rank's batch: find the input, with its features shifted by one."""
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        inputs = torch.randn(64, WIDTH, generator=generator).to(self.device)
        hidden = inputs
        for layer in self.layers.values():
            hidden = hidden + torch.tanh(hidden @ layer.T) / NUM_LAYERS
        return (hidden - inputs.roll(1, dims=1)).square().mean()

    def _mean(self, loss: Tensor) -> float:
        total = loss.clone()
        dist.all_reduce(total)  # on the default group, as Megatron does for its log
        return total.item() / self.size


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Use each kind of collective once on both groups. A save that needs no others needs no new memory: it
    is not for lack of a warm-up that one fails."""
    for each in (dist.group.WORLD, group):
        size = dist.get_world_size(each)
        one, all_ = torch.ones(1 << 16, device=device), torch.ones((1 << 16) * size, device=device)
        dist.all_reduce(one, group=each)
        dist.all_gather_into_tensor(all_, one, group=each)
        dist.reduce_scatter_tensor(one, all_, group=each)
        dist.broadcast(one, src=0, group=each)


def _rows(buffer: Tensor, layer: int) -> Tensor:
    return buffer.detach()[layer * WIDTH : (layer + 1) * WIDTH]
