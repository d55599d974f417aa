import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Results are bit-for-bit reproducible for a fixed number of threads, and tests share few cores."""
    torch.set_num_threads(1)
