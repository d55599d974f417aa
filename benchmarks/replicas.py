"""Train with replicas that rarely talk: ``python -m benchmarks.replicas TOKENS --out RUNS``.

The network, its data and its tokens per update are those of ``benchmarks.staleness``: PETRA with 16 stages, k = 8 and Muon at the
rate that was best without replicas. Each replica has an equal share of each microbatch, so that all runs see the same tokens in the
same number of updates; the runs without replicas there are those that sum gradients at every update. Cells are named by H, the
number of replicas, and the setting. One replica with the same outer step shows what the step itself does.

All replicas of a run are in this process, each in a thread. Their sums are those of processes: in the order of the replicas, and
packed as these pack them. Each run is written to a file of its own in RUNS. Runs that are there are not repeated.

``python -m benchmarks.replicas - --out RUNS --beside docs/evidence/records/staleness.jsonl`` prints a table instead, in which
runs are compared with those that sum gradients at every update, seed by seed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import recorded
from benchmarks.report import cells_parser, machine
from benchmarks.staleness.cells import CLIP, VOCABULARY, WINDOW, WINDOWS, Cell
from benchmarks.staleness.figures import final, shown
from benchmarks.staleness.train import TEST_WINDOWS, VALIDATION_WINDOWS, mean_loss
from launch.run.folder import records_in
from launch.runtime.terminal import command
from petra import OuterStep, Pipeline, Recipe, TensorSpec, UpdateRules
from petra.data import TrainSource, load_dataset
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.weight_drift import norm
from petra.engine.options.outer_step import OuterUpdate
from petra.engine.options.replicas import OwnShare
from petra.engine.options.sums import CHUNK, AllReduces, Packed
from petra.errors import NumericsError
from petra.hooks import Gradients
from petra.plan import make_plan
from petra.specs import Streams
from petra.training import Cosine

CELL, RATE, UPDATES, SEEDS = Cell("petra", 8, "muon"), 0.008, 256, (0, 1, 2)
STREAMING = {"lr": 0.4, "mixing": 0.5, "staggered": True, "format": "int8"}
SETTINGS: dict[str, Mapping[str, Any]] = {
    "": {},
    "_local_sgd": {"lr": 1.0, "momentum": 0.0},
    "_streaming": STREAMING | {"overlap": 2},
}
"""DiLoCo's outer step; the mean of the weights; Streaming DiLoCo's."""
RUNS = [(every, dp, name) for name in SETTINGS for every, dp in ((16, 2), (16, 1), (4, 2), (32, 2), (16, 4), (4, 4), (32, 4))]
RUNS += [(4, 1, ""), (32, 1, "")]


class InOneProcess(AllReduces):
    """Mean over replicas in threads, of one stage.

    Args:
        arrived: What replicas have sent in each round, by replica; shared by all of them, as is ``changed``.
        replica: This replica.
        size: Number of replicas.
        packed: Format.
    """

    def __init__(
        self, arrived: dict[int, dict[int, Tensor]], changed: Condition, replica: int, size: int, packed: Packed | None
    ) -> None:
        self._arrived, self._changed, self._replica, self._size, self._form = arrived, changed, replica, size, packed
        self._round = 0

    def start(self, tensor: Tensor) -> None:
        self._tensor, self._round = tensor, self._round + 1
        with self._changed:
            self._arrived.pop(self._round - 2, None)  # all have finished it, as they have started the next one
            self._arrived.setdefault(self._round, {})[self._replica] = self._traveled(tensor.clone())
            self._changed.notify_all()

    def advance(self) -> None:
        pass

    def finish(self) -> float:
        sent = self._arrived[self._round]
        with self._changed:
            self._changed.wait_for(lambda: len(sent) == self._size, timeout=3600)
        total = torch.stack([sent[r] for r in range(self._size)]).sum(0)
        self._tensor.copy_(self._traveled(total))
        return 1.0

    def _traveled(self, tensor: Tensor) -> Tensor:
        if self._form is None:
            return tensor
        padded = tensor.new_zeros(1, -(-len(tensor) // CHUNK) * CHUNK)
        padded[0, : len(tensor)] = tensor
        return self._form.unpack(self._form.pack(padded))[0, : len(tensor)]


def join(pipelines: Sequence[Pipeline]) -> None:
    """Let pipelines of one replica each be the replicas of one run, each in a thread."""
    changed = Condition()
    for j in pipelines[0].workers:
        arrived: dict[int, dict[int, Tensor]] = {}
        for r, pipeline in enumerate(pipelines):
            update = pipeline.workers[j].update[OuterUpdate]
            update.join(InOneProcess(arrived, changed, r, len(pipelines), update.packed), len(pipelines))


class ErrorsAfterSteps(ReconstructionMonitor):
    """Relative errors of x̃ at every microbatch: of the τ after an outer step, whose forward came before it, and of the others.

    Attributes:
        found: Errors by stage (from 0), and by whether the outer step was between the two passes.
    """

    def __init__(self, pipeline: Pipeline, outer: OuterStep) -> None:
        super().__init__(pipeline, math.inf)
        k, count = pipeline.plan.k, len(pipeline.plan.stages)
        self._period = outer.every * k
        self._steps = [k * (outer.overlap + (j * outer.every // count if outer.staggered else 0)) for j in range(count)]
        self.found: dict[tuple[int, bool], list[float]] = defaultdict(list)

    def block_forward_begin(self, stage: int, block: int, m: int, x: Streams) -> None:
        if block in self.blocks:
            self._inputs[block, m] = tuple(t[:1].clone() for t in x)

    def block_backward_end(self, stage: int, block: int, m: int, x: Streams, gradients: Gradients) -> None:
        if (true := self._inputs.pop((block, m), None)) is not None and m >= 2 * self._period:
            difference = [a[:1].double() - b.double() for a, b in zip(x, true, strict=True)]
            between = (m - self._steps[stage]) % self._period < self.pipeline.plan.delays[stage]
            self.found[stage, between].append((norm(difference) / norm(true)).item())


def train(every: int, dp: int, setting: Mapping[str, Any], seed: int, data: Path) -> dict[str, Any]:
    """Train all replicas, and return the record. A run whose loss is not finite has infinite losses."""
    torch.set_num_threads(1)
    size, microbatches = WINDOWS // CELL.k, UPDATES * CELL.k
    parts = {name: load_dataset("tokens", root=data, size=WINDOW, classes=VOCABULARY, split=name) for name in ("val", "test")}
    outer, inputs = OuterStep(every, **setting), TensorSpec((size // dp, WINDOW), torch.int64)
    recipe = Recipe(
        CELL.make_optimizer(),
        Cosine(RATE, microbatches, 1, 0.1),
        seed=seed,
        rules=UpdateRules(clip=CLIP),
        extensions=[outer],
    )
    pipelines = [Pipeline(CELL.make_model(), inputs, recipe, method=CELL.make_method(), k=CELL.k) for _ in range(dp)]
    layout = make_plan(CELL.make_model(), TensorSpec((size, WINDOW), torch.int64), k=CELL.k, processes=dp, dp=dp).layout
    if dp > 1:
        join(pipelines)
    errors, losses, begun = ErrorsAfterSteps(pipelines[0], outer), list[float](), time.time()
    pipelines[0].hooks.append(errors)

    def run(r: int) -> None:
        torch.set_num_threads(1)
        source = OwnShare(TrainSource(parts["val"], size, seed), layout, r, range(dp)) if dp > 1 else None
        note = (lambda report: losses.append(report[1].item() / report[0].item())) if r == 0 else None
        pipelines[r].train(source or TrainSource(parts["val"], size, seed), microbatches, note)

    try:
        with ThreadPoolExecutor(dp) as threads:
            list(threads.map(run, range(dp)))
        failed = False
    except NumericsError:
        failed = True
    seconds, model = time.time() - begun, CELL.make_model().build(seed)
    model.load_state_dict(pipelines[0].state_dict())
    model.eval()
    windows = {"val": VALIDATION_WINDOWS, "test": TEST_WINDOWS}
    nats = {name: math.inf if failed else mean_loss(model, parts[name].test, windows[name]) for name in parts}
    return {
        "every": every,
        "dp": dp,
        "setting": {key: getattr(outer, key) for key in ("lr", "momentum", "overlap", "mixing", "format", "staggered")},
        "rate": RATE,
        "updates": UPDATES,
        "seed": seed,
        "loss": nats,
        "bits_per_byte": {name: nats[name] / math.log(2) / (parts[name].bytes_per_target or math.nan) for name in nats},
        "curve": [round(statistics.fmean(losses[i : i + CELL.k]), 4) for i in range(0, len(losses), CELL.k)],
        "reconstruction_error": {
            f"{j + 1}{' across a step' if between else ''}": float(f"{statistics.fmean(found):.3g}")
            for (j, between), found in sorted(errors.found.items())
        },
        "seconds": round(seconds, 1),
        "machine": machine(),
    }


def table(records: Mapping[str, Mapping[str, Any]], beside: Mapping[int, float]) -> str:
    """Return Markdown.

    Args:
        records: Those of ``train``, by name.
        beside: Bits per byte on the test part of runs that sum gradients at every update, by seed.
    """
    cells: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, record in records.items():
        cells[name.rpartition("_s")[0]].append(record)
    head = "cell | seeds | bits per byte | above sums at every update | error of x̃, stage 2 | after a step"
    lines = [f"| {head} |", "|---" * 6 + "|"]
    for cell, found in sorted(cells.items(), key=lambda item: (item[1][0]["dp"], item[1][0]["every"], item[0])):
        losses = {record["seed"]: record["bits_per_byte"]["test"] for record in found}
        errors = [statistics.fmean(record["reconstruction_error"][key] for record in found) for key in ("2", "2 across a step")]
        bits = f"{statistics.fmean(losses.values()):.3f}"
        lines.append(f"| `{cell}` | {len(found)} | {bits} | {shown(losses, beside)} | {errors[0]:.2f} | {errors[1]:.2f} |")
    return "\n".join(lines)


@command
def main() -> None:
    """Train all cells with the first seed, then with the others."""
    cells = {f"h{every}_dp{dp}{setting}": (every, dp, setting) for every, dp, setting in RUNS}
    parser = cells_parser(__doc__, cells)
    parser.add_argument("--beside", type=Path, help="print a table with these records of benchmarks.staleness")
    options = parser.parse_args()
    if options.beside is not None:
        print(table(records_in(options.out), final([r for r in records_in(options.beside).values() if r["cell"] == CELL.name])))
        return
    for seed in SEEDS:
        for name, (every, dp, setting) in cells.items():
            if name in options.cells:
                values = SETTINGS[setting]
                values = values if dp > 1 or "format" not in values else {**values, "format": None}
                found = recorded(options.out, f"{name}_s{seed}", lambda: train(every, dp, values, seed, options.tokens))  # noqa: B023
                print(f"{name}, seed {seed}: {found['bits_per_byte']} bits per byte", flush=True)


if __name__ == "__main__":
    main()
