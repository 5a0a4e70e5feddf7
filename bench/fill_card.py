"""Take what is left of the first GPU's memory, as a long training does, and hold it until killed.

usage: python bench/fill_card.py [--leave_mib 8]
"""

from __future__ import annotations

import argparse
import time

import torch

SIZES = (4 << 30, 1 << 30, 256 << 20, 64 << 20, 16 << 20, 2 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leave_mib", type=int, default=8)
    leave = parser.parse_args().leave_mib << 20
    held = []
    for size in SIZES:
        while torch.cuda.mem_get_info()[0] > size + leave:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    print(f"card full: {torch.cuda.mem_get_info()[0] / 2**20:.1f} MiB free", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
