"""Program that test_cluster runs in each process of two nodes. It reports node and rank, and trains a few microbatches."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from launch.runtime.rank import Process
from petra.distributed import all_gather_objects
from petra.training import sgd
from tests.support.nets import RandomSource, make_pipeline, mixed_net


def train() -> dict[str, torch.Tensor]:
    """Return the weights of this process's stages after twelve microbatches."""
    torch.set_num_threads(1)
    stream = RandomSource()
    pipeline = make_pipeline(mixed_net(), stream.spec, k=2, optimizer=sgd, learning_rate=lambda t: 0.02)
    pipeline.train(stream, 12)
    return pipeline.state_dict()


if __name__ == "__main__":
    process = Process.from_environment()
    with process.process_group(torch.device("cpu"), timeout=60):
        parts = all_gather_objects(({"node": os.environ["GROUP_RANK"], "local rank": process.local_rank}, train()))
        if process.first:
            torch.save(parts, sys.argv[1])
        dist.barrier()
