"""The device's memory: filling it as training does, and reading who holds how much of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from landfall.repro.outcome import Memory

LEAVE_BYTES = 8 << 20
"""What the driver has left on a full card: less than NCCL needs for one more channel."""

_CHUNK_BYTES = 4 << 30
_PAGE_BYTES = 2 << 20  # the driver's granularity
_LARGE_BYTES = 16 << 20  # torch takes exactly as much as is asked for from the driver only above 10 MiB


@dataclass(frozen=True)
class Reading:
    """Bytes at one moment: ``free`` on the whole device, the rest of this process's allocator."""

    free: int
    reserved: int
    allocated: int
    allocations: int


class Card:
    """One rank's device. On the CPU nothing is filled and nothing read."""

    def __init__(self, device: torch.device, *, fills: bool) -> None:
        self.device = device
        self._fills = fills  # of all ranks on a device, one
        self._held: list[torch.Tensor] = []

    @property
    def is_full(self) -> bool:
        return bool(self._held)

    def keep_spare(self) -> None:
        """Leave some freed blocks in torch's cache, as training does.

        Objects that are exchanged as tensors find room there, so that it is NCCL that meets the full card.
        """
        if self.device.type == "cuda":
            small = [torch.empty(512 << 10, dtype=torch.uint8, device=self.device) for _ in range(16)]
            large = torch.empty(_LARGE_BYTES, dtype=torch.uint8, device=self.device)
            del small, large

    def fill(self) -> None:
        """Let the caching allocator take all of the device but LEAVE_BYTES; it keeps it to the end."""
        if not self._fills or self.device.type != "cuda":
            return
        limit = _CHUNK_BYTES
        while (size := _next_chunk(self.free_bytes() - LEAVE_BYTES, limit)) >= _LARGE_BYTES:
            try:
                self._held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:
                limit = size // 2

    def free_bytes(self) -> int:
        """What the driver still has for whoever asks."""
        return torch.cuda.mem_get_info(self.device)[0]

    def read(self) -> Reading | None:
        """Call it when no rank on this device is busy. Does not wait for the device: it may hang."""
        if self.device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self.device)
        reading = Reading(
            free=self.free_bytes(),
            reserved=torch.cuda.memory_reserved(self.device),
            allocated=torch.cuda.memory_allocated(self.device),
            allocations=stats.get("allocation.all.allocated", 0),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        return reading

    def since(self, before: Reading | None) -> Memory | None:
        """What was taken since ``before``, the last reading."""
        if before is None:
            return None
        peak = torch.cuda.max_memory_allocated(self.device)
        now = self.read()
        assert now is not None and self.device.index is not None
        return Memory(
            device=self.device.index,
            driver=before.free - now.free,
            reserved=now.reserved - before.reserved,
            peak=peak - before.allocated,
            allocations=now.allocations - before.allocations,
        )


def _next_chunk(room: int, limit: int) -> int:
    """Whole pages, and never so many that a rest remains which torch could not take exactly."""
    size = min(room, limit) // _PAGE_BYTES * _PAGE_BYTES
    if _PAGE_BYTES <= room - size < _LARGE_BYTES:
        size -= _LARGE_BYTES
    return size
