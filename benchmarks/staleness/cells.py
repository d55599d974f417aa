"""The cells of the grid: what is compared, and on which network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from examples.remedies.fitted import FittedPrediction
from petra import METHODS, Extension, Keep, Method, Model, Numerics
from petra.engine.recipe import OptimizerFactory
from petra.models import gpt, revgpt
from petra.staleness import Feedback, WeightPrediction
from petra.training import OPTIMIZERS

VOCABULARY, WINDOW, WINDOWS = 1024, 64, 32
"""Tokens of the vocabulary, tokens of a window, windows of an update."""
SHAPES = {8: (6, 84, 6, 240), 16: (14, 56, 4, 160), 32: (30, 40, 4, 96)}
"""Layers, width, heads and hidden units by the number of stages: one layer per stage between stem and head, about 0.5 M parameters
in the layers."""
OTHER_SHAPES = {"gpt_wide": (14, 64, 4, 184), "revgpt_2m": (14, 112, 8, 320)}
"""Shapes for 16 stages: 4/3 of the parameters, with which ``gpt`` computes as much per token as PETRA; and four times as many."""
HEADS = ("sum", "last", "norms")
"""Heads of :func:`petra.models.revgpt` beside the one that reads both streams next to each other."""
OPTIONS = {
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "adamw_b1=0.95": {"betas": (0.95, 0.95), "weight_decay": 0.1},
    "nadam": {"betas": (0.99, 0.999), "weight_decay": 0.1},
    "muon": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "basis_rotation": {"betas": (0.9, 0.95), "weight_decay": 0.1},
}
"""Options of the optimizers. NAdam's betas are those of its paper for asynchronous pipelines. ``_b1=`` names another β₁."""
CLIP = 1.0
"""Largest norm of an update's gradient, for each stage."""


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        method: Name of a method in :data:`petra.METHODS`.
        k: Microbatches per update. All cells have the same tokens per update.
        optimizer: Key of :data:`OPTIONS`.
        remedy: ``none``, ``feedback``, ``prediction``, or ``fitted``, which is ours (``examples/remedies/fitted.py``).
        stages: Number of stages J, a key of :data:`SHAPES`.
        delay: Boundary delay other than the method's own, or None.
        keep: What blocks store, other than the method's own, or None.
        model: ``revgpt``; ``revgpt_2m``, four times as large; either with ``_`` and one of :data:`HEADS`; ``gpt``, the ordinary
            transformer of equal parameters; or ``gpt_wide``, that of equal compute.
    """

    method: str
    k: int = 8
    optimizer: str = "adamw"
    remedy: str = "none"
    stages: int = 16
    delay: int | None = None
    model: str = "revgpt"
    keep: str | None = None

    @property
    def name(self) -> str:
        """The name, which determines the cell."""
        own = ("" if self.delay is None else f"_d{self.delay}") + ("" if self.keep is None else f"_{self.keep}")
        other = [part for part, usual in ((self.remedy, "none"), (self.model, "revgpt")) if part != usual]
        return "_".join([f"j{self.stages}", f"{self.method}{own}", f"k{self.k}", self.optimizer, *other])

    @property
    def setting(self) -> dict[str, Any]:
        """The fields by which tables compare cells."""
        return {key: getattr(self, key) for key in ("method", "k", "optimizer", "remedy", "stages", "model", "keep")}

    def make_numerics(self) -> Numerics:
        """Return the number formats."""
        return Numerics()

    def make_method(self) -> Method:
        """Return the method."""
        found = METHODS[self.method]
        found = found if self.delay is None else replace(found, delay=self.delay)
        return found if self.keep is None else replace(found, keep=Keep(self.keep))

    def make_model(self) -> Model:
        """Return the network."""
        size, _, head = self.model.rpartition("_")
        size, reads = (size, {"head": head}) if head in HEADS else (self.model, {})
        return network(size, OTHER_SHAPES.get(size, SHAPES[self.stages]), **reads)

    def make_optimizer(self) -> OptimizerFactory:
        """Return a function that builds the optimizer of a stage."""
        return partial(OPTIMIZERS[self.optimizer.partition("_b1=")[0]], **OPTIONS[self.optimizer])

    def make_remedies(self) -> tuple[Extension, ...]:
        """Return the remedies. Muon's momentum is no step, so its prediction repeats the last update."""
        if self.remedy == "feedback":
            return (Feedback(),)
        if self.remedy == "prediction":
            return (WeightPrediction("difference" if self.optimizer == "muon" else "velocity"),)
        return (FittedPrediction(),) if self.remedy == "fitted" else ()


def network(name: str, shape: tuple[int, int, int, int], **options: Any) -> Model:
    """Return a network of the benchmark.

    Args:
        name: Begins with ``revgpt`` or ``gpt``.
        shape: Layers, width, heads and hidden units.
        options: Further arguments of :func:`petra.models.revgpt` or :func:`petra.models.gpt`.
    """
    depth, dim, heads, hidden = shape
    return (revgpt if name.startswith("revgpt") else gpt)(
        VOCABULARY,
        dim,
        depth,
        heads,
        size=WINDOW,
        hidden=hidden,
        mlp="swiglu",
        norm="rmsnorm",
        bias=False,
        positions="rotary",
        qk_norm=True,
        delimiter=0,
        embedding_std=0.4,
        **options,
    )


def _grid() -> tuple[Cell, ...]:
    stale = ("petra", "dsp", "delayed")
    adamw = [Cell("backprop"), *(Cell(method, k) for k, method in product((8, 4, 16, 32), stale))]
    optimizers = [
        cell
        for optimizer in ("muon", "nadam", "basis_rotation")
        for cell in (
            Cell("backprop", optimizer=optimizer),
            *(Cell(method, k, optimizer) for k, method in product((4, 16), ("petra", "dsp"))),
        )
    ]
    remedies = [Cell("petra", *setting) for setting in product((4, 16), ("adamw", "muon"), ("feedback", "prediction"))]
    bounded = [Cell(method, 16, optimizer) for method, optimizer in product(("pipedream_2bw", "paci"), ("adamw", "muon"))]
    lengths = [Cell(method, k, stages=j) for j, k in ((8, 4), (32, 16)) for method in ("backprop", "petra", "dsp")]
    fresh = [Cell("petra", 8, optimizer, delay=1) for optimizer in ("adamw", "muon")]
    ordinary = [Cell("backprop", model=model) for model in ("gpt", "gpt_wide")]
    return (*adamw, *optimizers, *remedies, *fresh, *bounded, *ordinary, *lengths)


GRID = _grid()
"""All cells, in the order in which they run."""
IDEA = (Cell("petra", 4, "muon", "fitted"), Cell("petra", 8, "muon"), Cell("petra", 8, "muon", "fitted"))
CONTROL = Cell("dsp", 16, "muon", "feedback")
"""Beside the grid: an idea of ours, a fitted gain, and PETRA without it; and ``dsp`` with the remedy of PETRA's best cell."""
RECIPES = (
    Cell("petra", 32, "muon"),
    Cell("petra", 32, "muon", "feedback"),
    Cell("pipedream_2bw", 16, "muon", "feedback", keep="nothing"),
    Cell("pipedream_2bw", 16, "adamw", "feedback", keep="nothing"),
    Cell("petra", 16, "adamw_b1=0.95"),
)
"""What a user might choose beside the grid: PETRA at 0.94 updates with Muon, reversible PipeDream-2BW, a larger β₁."""
GRAPHS = (
    *(
        Cell("petra", k, optimizer, delay=d, keep="graph")
        for k, d in ((8, None), (8, 1), (32, 1))
        for optimizer in ("muon", "adamw")
    ),
    Cell("petra", 8, "muon", "feedback", keep="graph"),
)
"""PETRA with stored graphs: gradients of old activations through current weights."""
READS = tuple(Cell("backprop", optimizer="muon", model=f"revgpt_{head}") for head in HEADS)
"""Other heads, by backpropagation, with the optimizer of the lowest losses."""
AGAIN = ("petra_k4_adamw", "dsp_k4_adamw", "dsp_k4_nadam", "petra_k16_muon_feedback", "paci_k16_muon")
BASES = tuple(f"backprop_k8_{optimizer}" for optimizer in ("adamw", "nadam", "muon"))
LARGE = tuple(replace(cell, model="revgpt_2m") for cell in GRID if cell.name.removeprefix("j16_") in (*AGAIN, *BASES))
LARGE += tuple(replace(cell, model=cell.model.replace("revgpt", "revgpt_2m")) for cell in READS)
"""At 2 M parameters: the two cells least above backpropagation, the three most above it, backpropagation, and other heads."""
CELLS = (*GRID, *IDEA, CONTROL, *RECIPES, *GRAPHS, *READS, *LARGE)
MOST_COMPARED = (Cell("backprop"), Cell("petra", 8))
"""Cells with five seeds instead of three."""
