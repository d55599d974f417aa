"""A pipeline over four processes, with its timeline.

``torchrun --nproc-per-node 4 examples/four_processes.py`` trains one stage in each process and draws
runs/four_processes/timeline.png; trace.json beside it opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from petra import Pipeline, Recipe, TensorSpec
from petra.analysis.timeline import write_timeline
from petra.data import TrainSource, load_dataset
from petra.diagnostics.recorder import Recorder, gathered_intervals
from petra.models import revnet18
from petra.training import sgd


def main(microbatches: int = 60, recorded: int = 16, folder: Path = Path("runs/four_processes")) -> float:
    """Train, draw the first microbatches, and return the loss."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = TrainSource(load_dataset("digits"), batch_size=64, seed=0)
    inputs = TensorSpec((64, 3, 32, 32), torch.float32)
    pipeline = Pipeline(revnet18(width=0.25), inputs, Recipe(sgd, lambda t: 0.05), method="petra", k=2, stages=4)
    pipeline.train(data, 4)  # the first microbatches also wait for libraries to load
    recorder = Recorder(pipeline, recorded)
    with pipeline.hooks.attached(recorder):
        result = pipeline.train(data, microbatches)
    intervals = gathered_intervals(recorder.intervals)
    if pipeline.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_timeline(intervals, folder, f"RevNet-18 by petra in four processes, {recorded} microbatches")
        print(f"loss {result.loss:.3f} over {microbatches} microbatches; {folder / 'timeline.png'} shows {recorded}")
    dist.destroy_process_group()
    return result.loss


if __name__ == "__main__":
    main()
