"""What a dry run shows: the stages of a configuration before any of it is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from launch.run.build import Plan
from petra.method import Keep
from petra.model import BlockProfile
from petra.specs import TensorSpec


@dataclass(frozen=True)
class StageRow:
    """One stage of the map."""

    number: int
    processes: tuple[int, ...]
    """One of each replica."""
    blocks: tuple[BlockProfile, ...]
    keeps: tuple[Keep, ...]
    delay: int
    flops: int
    """Of the whole network."""
    last: bool

    @property
    def forward_bytes(self) -> int:
        """Of the message to the next stage."""
        return 0 if self.last else sum(map(_bytes, self.blocks[-1].outputs))

    @property
    def backward_bytes(self) -> int:
        """Of the message that comes back from it: δ, and x̃ where this stage keeps nothing of its last block."""
        return self.forward_bytes * (2 if self.keeps[-1] is Keep.NOTHING else 1)


COLUMNS: dict[str, Callable[[StageRow], str]] = {
    "stage": lambda row: str(row.number),
    "process": lambda row: ", ".join(map(str, row.processes)),
    "blocks": lambda row: row.blocks[0].name if len(row.blocks) == 1 else f"{row.blocks[0].name} … {row.blocks[-1].name}",
    "parameters": lambda row: f"{sum(block.parameters for block in row.blocks):,}",
    "FLOPs": lambda row: f"{sum(block.flops for block in row.blocks) / row.flops:.1%}",
    "τ": lambda row: str(row.delay),
    "keeps": lambda row: _counted(row.keeps),
    "MB →": lambda row: f"{row.forward_bytes / 1e6:.2f}",
    "MB ←": lambda row: f"{row.backward_bytes / 1e6:.2f}",
}
"""Title and content of each column of the map."""


def stage_map(plan: Plan) -> str:
    """A Markdown table of the stages; sizes are of one microbatch, or a replica's share of it."""
    rows = stage_rows(plan)
    cells = [list(COLUMNS), *([content(row) for content in COLUMNS.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    blocks = [block for row in rows for block in row.blocks]
    replicas = "" if plan.layout.dp == 1 else f" of each of {plan.layout.dp} replicas"
    title = (
        f"{plan.model.name} on {plan.config.data.name} by {plan.method.name} (d = {plan.method.delay}, k = {plan.config.k}): "
        f"{len(rows)} stages in {len(plan.layout.processes)} process(es){replicas}, "
        f"{sum(block.parameters for block in blocks):,} parameters, "
        f"{plan.layout.dp * rows[0].flops / 1e9:.3g} GFLOPs forward for a microbatch of {plan.inputs}"
    )
    return "\n".join([title, "", *lines])


def stage_rows(plan: Plan) -> list[StageRow]:
    """The stages in order."""
    layout = plan.layout
    count = len(layout.stages)
    delays = plan.method.delays(count, plan.config.k)
    owner = {j: rank for rank, stages in enumerate(layout.processes) for j in stages}
    rows = []
    for j, stage in enumerate(layout.stages):
        blocks, last = tuple(layout.profiles[b] for b in stage), j == count - 1
        kinds = [block.reversible for block in blocks]
        keeps = plan.method.keep_of(kinds, last=last and delays[j] == 0, first_block=stage.start)
        flops = sum(block.flops for block in layout.profiles)
        processes = tuple(range(owner[j], len(layout.processes) * layout.dp, len(layout.processes)))
        rows.append(StageRow(j + 1, processes, blocks, keeps, delays[j], flops, last))
    return rows


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


def _counted(keeps: tuple[Keep, ...]) -> str:
    """``nothing``, or ``2 input, 3 nothing`` where blocks differ."""
    if len({*keeps}) == 1:
        return str(keeps[0])
    return ", ".join(f"{n} {keep}" for keep, n in Counter(keeps).items())
