"""Targets that measure how costs grow, with stages and with depth: Table 1 of both papers. Both scales are the same."""

from __future__ import annotations

from dataclasses import asdict

from launch.reproduce.paper import TABLE1
from launch.reproduce.report import Report, Request
from launch.run.markdown import table
from petra.analysis import checkpointing
from petra.analysis.complexity import VARIANTS, measure
from petra.analysis.plots import Panel

STAGES = (2, 4, 8, 16)
LENGTHS = (4, 16, 64, 256)
ORDERS = {"naive": "L", "checkpointing": "√L", "recursive checkpointing": "log L", "reversible": "1"}
QUANTITIES = (
    ("graphs", "Activations held by the first stage between F and B, in graphs of a stage", 0),
    ("inputs", "The same in inputs of a stage", 1),
    ("weights", "Versions of the first stage's parameters", 2),
    ("forward", "Message from the first stage to the second, in activations of a residual block", None),
    ("backward", "Message back, in the same unit", 3),
    ("flops", "Work of all stages for a microbatch, in forwards of one stage", 4),
    ("period", "Time of a microbatch in the steady state by the simulator, F and B in turn, in forwards of one stage", 5),
)


def table1(request: Request) -> Report:
    """Every method on equal stages, trained in one process and watched."""
    found = {name: {j: measure(variant, j) for j in STAGES} for name, variant in VARIANTS.items()}
    parts = []
    for key, title, column in QUANTITIES:
        lines = [
            [
                name,
                TABLE1[name][column] if column is not None and name in TABLE1 else "",
                *(f"{getattr(of[j], key):.3g}" for j in STAGES),
            ]
            for name, of in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("method", "paper", *(f"J = {j}" for j in STAGES)), lines))
    parts.append(
        "`reversible`, `reconstruct_stashed` and `petra` run couplings of two streams, the others residual blocks of one, with "
        "the same F. k is 1, but J for `pipedream_2bw`, `1f1b` and `gpipe`. Held is at the end of an F, so the microbatch that the "
        "stage works on counts too: 2(J − 1) + 1 where the paper has 2(J − j). The paper's mean time assumes a stage's F and B at "
        "the same time."
    )
    return Report("\n".join(parts) + "\n", {name: {j: asdict(of[j]) for j in STAGES} for name, of in found.items()})


def revnet_table1(request: Request) -> Report:
    """Four ways to backpropagate through L equal couplings."""
    found = {name: {n: checkpointing.measure(scheme, n) for n in LENGTHS} for name, scheme in checkpointing.SCHEMES.items()}
    parts = []
    for key, title in (
        ("activations", "Activations held at most, in inputs of a block"),
        ("forwards", "Work for each block, in its forwards"),
    ):
        lines = [
            [name, f"O({ORDERS[name]})" if key == "activations" else "", *(f"{getattr(of[n], key):.3g}" for n in LENGTHS)]
            for name, of in found.items()
        ]
        parts.append(f"{title}:\n\n" + table(("scheme", "order", *(f"L = {n}" for n in LENGTHS)), lines))
    drawn = {name: [(float(n), of[n].activations) for n in LENGTHS] for name, of in found.items()}
    parts.append(
        "Orders are those of the schemes' sources (Martens and Sutskever 2012; Chen et al. 2016; Gomez et al. 2017). Plain "
        "backpropagation works 3 forwards a block; recursion works log₂ L more."
    )
    panel = Panel("L, blocks", "activations held, in inputs of a block", drawn, "log", powers=True)
    return Report(
        "\n".join(parts) + "\n", {name: {n: asdict(of[n]) for n in LENGTHS} for name, of in found.items()}, [panel], columns=1
    )
