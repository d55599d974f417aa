"""What test_cluster runs in each process of two nodes: who stands where, and a few microbatches over all of them."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from launch.runtime.rank import Place
from petra import Pipeline
from petra.distributed import gathered
from petra.training import sgd
from tests.support.nets import RandomStream, mixed_net


def train() -> dict[str, torch.Tensor]:
    """The weights of this process's stages after twelve microbatches."""
    torch.set_num_threads(1)
    stream = RandomStream()
    pipeline = Pipeline(mixed_net(), stream.spec, k=2, optimizer=sgd, learning_rate=lambda t: 0.02)
    pipeline.train(stream, 12)
    return pipeline.state_dict()


if __name__ == "__main__":
    place = Place.from_environment()
    with place.joined(torch.device("cpu"), timeout=60):
        parts = gathered(({"node": os.environ["GROUP_RANK"], "local rank": place.local_rank}, train()))
        if place.first:
            torch.save(parts, sys.argv[1])
        dist.barrier()
