from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sft.model import tiny


@pytest.fixture(scope="package", autouse=True)
def one_rank() -> Iterator[None]:
    """This process is a job of one rank; tests with more start their own."""
    torch.set_num_threads(1)
    tiny.join()
    yield
    tiny.leave()
