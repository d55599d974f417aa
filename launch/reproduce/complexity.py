"""Targets that measure how costs grow with stages and with depth: Table 1 of both papers. Both scales are the same."""

from __future__ import annotations

from dataclasses import asdict

from petra.analysis import checkpointing
from petra.analysis.complexity import VARIANTS, measure
from petra.analysis.plots import Panel

from ..run.markdown import table
from .paper import REVNET_TABLE1, TABLE1
from .report import Report, Request

STAGES = (2, 4, 8, 16)
LENGTHS = (4, 16, 64, 256)
QUANTITIES = (
    ("graphs", "Activations that the first stage stores between forward and backward, in graphs of a stage", 0),
    ("inputs", "The same activations in inputs of a stage", 1),
    ("weights", "Versions of the first stage's parameters", 2),
    ("forward", "Message from the first stage to the second, in activations of a residual block", None),
    ("backward", "Message from the second stage to the first, in activations of a residual block", 3),
    ("flops", "Compute of all stages for one microbatch, in forwards of one stage", 4),
    (
        "period",
        "Simulated time per microbatch in the steady state if each stage alternates forward and backward, in forwards of one stage",
        5,
    ),
    (
        "overlapped",
        "The same if stages whose next boundary has d >= 2 run forward beside backward (`trainer.overlap=true`)",
        5,
    ),
)
"""Attribute of a measurement, title of its table, and column in the paper's table."""


def table1(request: Request) -> Report:
    """Measure the cost of every method on equal stages, trained in one process (PETRA, Table 1)."""
    found = {name: {j: measure(variant, j) for j in STAGES} for name, variant in VARIANTS.items()}
    parts = []
    for key, title, column in QUANTITIES:
        lines = [
            [
                name,
                TABLE1[name][column] if column is not None and name in TABLE1 else "",
                *(f"{getattr(by_stages[j], key):.3g}" for j in STAGES),
            ]
            for name, by_stages in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("method", "paper", *(f"J = {j}" for j in STAGES)), lines))
    parts.append(
        "`reversible`, `reconstruct_stashed` and `petra` run couplings of two streams, the other methods residual blocks of one "
        "stream, all with the same F. k is 1, except for `pipedream_2bw`, `1f1b` and `gpipe`, where k = J. Stored activations are "
        "counted at the end of a forward, so the current microbatch is included: 2(J − 1) + 1 for the first stage, where the "
        "paper's formula 2(J − j) gives 2(J − 1). The paper's mean time assumes that a stage runs forward and backward at the same "
        "time."
    )
    return Report("\n".join(parts) + "\n", {name: {j: asdict(by_stages[j]) for j in STAGES} for name, by_stages in found.items()})


def revnet_table1(request: Request) -> Report:
    """Measure four ways to backpropagate through L equal couplings (RevNet, Table 1)."""
    found = {name: {n: checkpointing.measure(scheme, n) for n in LENGTHS} for name, scheme in checkpointing.SCHEMES.items()}
    parts = []
    for column, (key, title) in enumerate(
        (
            ("activations", "Largest number of stored activations, in inputs of a block"),
            ("forwards", "Compute per block, in forwards of a block"),
        )
    ):
        lines = [
            [name, REVNET_TABLE1[name][column], *(f"{getattr(by_length[n], key):.3g}" for n in LENGTHS)]
            for name, by_length in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("scheme", "order of all blocks, paper", *(f"L = {n}" for n in LENGTHS)), lines))
    parts.append(
        "Plain backpropagation computes 3 forwards per block, recursive checkpointing log₂ L more. The paper's section 4 counts "
        "2L, 3L, L log L and 3L, with a backward as expensive as a forward; its section 3.2 counts 3 and 4 per connection, as here."
    )
    curves = {name: [(float(n), by_length[n].activations) for n in LENGTHS] for name, by_length in found.items()}
    panel = Panel("L, blocks", "stored activations, in inputs of a block", curves, "log", powers=True)
    data = {name: {n: asdict(by_length[n]) for n in LENGTHS} for name, by_length in found.items()}
    return Report("\n".join(parts) + "\n", data, [panel], columns=1)
