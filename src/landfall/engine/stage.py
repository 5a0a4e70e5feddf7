"""From where tensors lie to host memory, in bounded pieces and without a byte of device memory.

Host tensors are written from where they are. Device tensors pass through two pinned buffers: while one is
being written, the next piece is copied into the other. Only contiguous runs are copied, because torch would
allocate device memory to copy anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

BUFFER_BYTES = 32 << 20


class Stager:
    """Two pinned host buffers, made before training fills device and host."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._events = [torch.cuda.Event() for _ in self._buffers]
            self._warm_up(self._stream)

    def _warm_up(self, stream: torch.cuda.Stream) -> None:
        """Copy both ways once: the driver takes a little memory for a stream's and an event's first use."""
        with torch.cuda.stream(stream):
            on_device = torch.zeros(64, dtype=torch.uint8, device=stream.device)
            for buffer, event in zip(self._buffers, self._events, strict=True):
                buffer[:64].copy_(on_device, non_blocking=True)
                on_device.copy_(buffer[:64], non_blocking=True)
                event.record(stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        stream.synchronize()

    def pieces(self, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
        """The row-major bytes of ``tensors``, one after the other; a piece is valid until the next is taken.

        The caller's stream must not change the tensors meanwhile (a synchronous save: nothing else runs).
        """
        if self._stream is None:
            for tensor in tensors:
                for run in contiguous_runs(tensor):
                    if run.is_cuda:
                        raise ValueError("a Stager made for the CPU got a tensor on a device")
                    yield host_bytes(run)
            return
        yield from self._from_device(tensors, self._stream)

    def _from_device(
        self, tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream
    ) -> Iterator[memoryview]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        previous: tuple[int, int] | None = None
        for count, run in enumerate(self._bounded_runs(tensors)):
            slot = count % len(self._buffers)
            with torch.cuda.stream(stream):
                self._buffers[slot][: run.numel()].copy_(run, non_blocking=True)
                self._events[slot].record(stream)
            if previous is not None:
                yield self._filled(previous)
            previous = (slot, run.numel())
        if previous is not None:
            yield self._filled(previous)

    def _filled(self, piece: tuple[int, int]) -> memoryview:
        slot, num_bytes = piece
        self._events[slot].synchronize()
        return memoryview(self._buffers[slot].numpy().data)[:num_bytes]

    def _bounded_runs(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        limit = self._buffers[0].numel()
        for tensor in tensors:
            for run in contiguous_runs(tensor):
                flat = _flat_bytes(run)
                for start in range(0, flat.numel(), limit):
                    yield flat[start : start + limit]


class StagedPieces:
    """The pieces of a stager, dealt out tensor by tensor. (A piece never holds bytes of two tensors.)"""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """The pieces of the next tensor, which has ``num_bytes``; each is valid until the next is taken."""
        while num_bytes:
            piece = next(self._pieces)
            if not piece:
                continue  # an empty tensor's
            yield piece
            num_bytes -= len(piece)

    def fill(self, into: memoryview) -> None:
        """Copy the next tensor, which is as long as ``into``."""
        position = 0
        for piece in self.take(len(into)):
            into[position : position + len(piece)] = piece
            position += len(piece)


def contiguous_runs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous views that together are ``tensor`` in row-major order; as few as its strides allow."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        yield tensor
        return
    for row in tensor:
        yield from contiguous_runs(row)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, as writable bytes."""
    return memoryview(_flat_bytes(tensor).numpy().data)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
