"""The cells: what is compared, and how many bytes cross a boundary."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from benchmarks.staleness.cells import OTHER_SHAPES, SHAPES, WINDOW, WINDOWS, Cell, network
from petra import Model, Numerics, TensorSpec
from petra.plan import make_plan
from petra.transport.packing import Packing

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinkCell(Cell):
    """A cell of ``benchmarks.staleness`` that sends less.

    Attributes:
        stream: Channels of each stream, or None for full streams. The hidden units of the MLPs are then as many as the parameters
            in the layers of the full network allow.
        x: Format of the streams, and of x̃, or None.
        delta: Format of δ, or None.
        stored: Format of stored inputs, or None.
    """

    stream: int | None = None
    x: str | None = None
    delta: str | None = None
    stored: Literal["bf16", "int8", "int8_token"] | None = None

    @property
    def name(self) -> str:
        """The name, which determines the cell."""
        parts = ("s", self.stream), ("x-", self.x), ("delta-", self.delta), ("stored-", self.stored)
        own = [f"{mark}{value}" for mark, value in parts if value is not None]
        return "_".join([super().name, *own])

    @property
    def setting(self) -> dict[str, Any]:
        """The fields by which tables compare cells."""
        own = ("stream", "x", "delta", "stored")
        return super().setting | {key: getattr(self, key) for key in own}

    @property
    def baseline(self) -> Cell:
        """The cell of full streams in float32 with the same delays and size: PETRA, which sends x̃."""
        return Cell("petra", self.k, self.optimizer, model="revgpt_2m" if self.model.endswith("_2m") else "revgpt")

    def make_numerics(self) -> Numerics:
        """Return the number formats."""
        return Numerics(message_format=self.x, gradient_format=self.delta, stored_format=self.stored)

    def make_model(self) -> Model:
        """Return the network."""
        if self.stream is None:
            return super().make_model()
        depth, dim, heads, full = OTHER_SHAPES["revgpt_2m"] if self.model.endswith("_2m") else SHAPES[self.stages]
        hidden = round(dim * (dim + 3 * full - 3 * self.stream) / (2 * dim + self.stream))
        return network(self.model, (depth, dim, heads, hidden), stream=self.stream)


def bytes_per_token(cell: Cell) -> tuple[float, float]:
    """Return the bytes per token that cross a boundary in each direction, forward and backward, in the busiest boundary.

    Token ids, scales, reports and the alignment of tensors in messages count.
    """
    rows = WINDOWS // cell.k
    inputs, numerics = TensorSpec((rows, WINDOW), torch.int64), cell.make_numerics()
    plan = make_plan(cell.make_model(), inputs, method=cell.make_method(), k=cell.k, numerics=numerics, processes=cell.stages)
    found = [[Packing(spec, CPU, "").bytes / (rows * WINDOW) for spec in boundary] for boundary in plan.boundaries]
    forward, backward = (max(sizes) for sizes in zip(*found, strict=True))
    return forward, backward


NARROW = tuple(
    LinkCell(method, k, "muon", model=model, stream=stream)
    for model, streams in (("revgpt", (14, 7, 28)), ("revgpt_2m", (28, 14)))
    for stream in streams
    for method, k in product(("petra", "dsp"), (8, 32))
)
"""Narrow streams at a staleness of 3.75 and 0.94 updates."""
ORDINARY = tuple(LinkCell("dsp", k, "muon", model="gpt", stream=14) for k in (8, 32))
"""The control with one narrow stream."""
FULL = tuple(
    LinkCell(method, k, "muon", model=model) for model, method, k in product(("revgpt", "revgpt_2m"), ("petra", "dsp"), (8, 32))
)
"""Full streams."""
FORMATS = (
    *(LinkCell("dsp", 8, "muon", x=name, delta=name) for name in ("bf16", "int8", "int8_token", "float8_token")),
    LinkCell("dsp", 8, "muon", x="int4_token", delta="int8_token"),
    LinkCell("dsp", 32, "muon", x="int8", delta="int8"),
)
"""Formats of x and δ that are screened, with one layer per stage, so that PETRA without x̃ is ``dsp``."""
RETURNED = (LinkCell("petra", 8, "muon", x="int8_token", delta="int8_token"),)
"""x̃ in few bits."""
STORED = (LinkCell("dsp", 8, "muon", stored="bf16"), LinkCell("dsp", 8, "muon", stored="int8_token"))
"""Stored inputs of fewer bits."""
JOINT = tuple(
    LinkCell("dsp", k, "muon", stream=stream, x=x, delta=delta)
    for stream, (x, delta) in product((14, 28), (("bf16", "bf16"), ("int8", "int8"), ("int8", "int4_token_stochastic")))
    for k in (8, 32)
)
"""Narrow streams in few bits."""
CELLS = (*NARROW, *ORDINARY, *FULL, *FORMATS, *RETURNED, *STORED, *JOINT)
