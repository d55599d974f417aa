"""Make a pre-trained decoder reversible: ``python -m benchmarks.reversible_conversion MODEL TEXT --out RECORDS --beta -0.25``.

Layers x + f(x) become one recurrence over two states, x_next = x + f(x) + β (x_before - x + c). It is the pre-trained network at
β = 0. For β ≠ 0 it can be inverted, with errors that grow by more than 1 / |β| per layer. The forms differ in c:

- ``dual``: c = 0. Dr²Net (arXiv 2401.04105) with α = 1 - β, and equation 3.6 of arXiv 2512.02056.
- ``momentum``: c = f(x). The midpoint rule at β = 1, and for β < 0 :class:`petra.huggingface.Momentum` with γ = -β. The output is
  x - β / (1 + β) (x - x_before), in which every f has weight 1.
- ``retrofit``: c = the f of the layer before, at x, because x_before ≈ x - f_before(x) in the pre-trained network (section 4 of
  arXiv 2512.02056). It computes every f twice.

States are float32, or ``exact``: float64, with each f rounded to a multiple of 2^-15. If β is a power of two, sums need
log2 (1 / |β|) more bits for each layer and no rounding, so the inverse is exact while 53 bits suffice. Without ``--updates``,
loss and errors of the pre-trained weights are measured. Data, optimizer and rates are those of :mod:`benchmarks.fine_tuning`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import fine_tuning as protocol
from benchmarks.records import recorded
from benchmarks.report import machine
from launch.runtime.terminal import command
from petra.reversible import Coupling, Gradients, ReversibleSequence
from petra.specs import Streams
from petra.training import Polynomial

SCALE, RATE = 2.0**15, 1e-4
WAYS: dict[str, tuple[bool, bool, float]] = {
    "float32": (False, False, 0.0),
    "bf16": (False, True, 0.0),
    "exact": (True, True, 0.0),
    "exact, moved weights": (True, True, 1e-4),
}
"""Measurements of errors: exact states, autocast to bf16, change of each weight between forward and backward."""


class Step(Coupling):
    """(x_before, x) → (x, x_next), a :class:`Coupling` of β x_before and x. Contains its layer, after the one before if needed."""

    def __init__(self, layers: Sequence[nn.Module], form: str) -> None:
        super().__init__(nn.ModuleList(layers))
        self.form, self.beta, self.exact = form, 0.0, True
        self.options: dict[str, Any] = {}

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        """Return (x, x_next)."""
        return super().forward(self.beta * x1, x2, seed=seed)

    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        """Return (x_before, x), the gradients with respect to them, and those of the weights."""
        (x1, x2), (dx1, dx2), gradients = super().inverse_vjp(y, dy, seed=seed)
        return (x1 / self.beta, x2), (self.beta * dx1, dx2), gradients

    def _evaluate(self, x: Tensor, context: Sequence[Tensor], seed: int | None) -> Tensor:
        """Return (1 - β) x + f(x) + β c."""
        hidden = x.float()
        *before, found = [layer(hidden, **self.options) - hidden for layer in self.f]
        found = found * (1 + self.beta) if self.form == "momentum" else found
        found = found + self.beta * before[0] if before else found
        return (1 - self.beta) * x + rounded(found, self.exact)


def rounded(x: Tensor, exact: bool) -> Tensor:
    """Return ``x``, or the nearest exact state with the gradient of ``x``."""
    y = x.double()
    return y + ((y.detach() * SCALE).round() / SCALE - y.detach()) if exact else x


class Converted(nn.Module):
    """Layers of a decoder as one recurrence."""

    def __init__(self, layers: Sequence[nn.Module], form: str) -> None:
        super().__init__()
        first = [0, *range(len(layers) - 1)] if form == "retrofit" else range(len(layers))
        self.steps = ReversibleSequence(Step(layers[max(i, 0) : j + 1], form) for j, i in enumerate(first))
        self.form, self.beta, self.exact, self.reconstruct, self.measured = form, 0.0, True, False, False

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Return the states after the layers, shaped as ``hidden_states``."""
        for step in self.steps.blocks:
            step.beta, step.exact, step.options = self.beta, self.exact, options
        x = rounded(hidden_states, self.exact)
        if self.measured:
            with torch.no_grad():
                self.states = self._states(x)
            self.states[-1] = tuple(t.requires_grad_() for t in self.states[-1])
        x1, x2 = self.states[-1] if self.measured else self.steps(x, x) if self.reconstruct else self._states(x)[-1]
        last = self.beta if self.form == "momentum" else 0.0
        return (x2 - last / (1 + last) * (x2 - x1)).to(hidden_states.dtype)

    def _states(self, x: Tensor) -> list[Streams]:
        states: list[Streams] = [(x, x)]
        for step in self.steps.blocks:
            states.append(step(*states[-1]))
        return states

    def backward(self, dy: Streams, true_inputs: bool) -> tuple[Tensor, list[float]]:
        """Return the gradients of the weights, and the relative errors of the inputs, last layer first."""
        found, errors, y = {p: torch.zeros_like(p) for p in self.parameters()}, list[float](), self.states[-1]
        for step, x in zip(reversed(self.steps.blocks), reversed(self.states[:-1]), strict=True):
            y, dy, gradients = step.inverse_vjp(y, dy)
            errors.append(((y[0] - x[0]).norm() / x[0].norm()).item())
            y = x if true_inputs else y
            for parameter, gradient in gradients.items():
                found[parameter] += gradient
        return torch.cat([gradient.flatten() for gradient in found.values()]), errors


def check(plain: protocol.Plain, converted: Converted, data: protocol.Windows, way: tuple[bool, bool, float]) -> dict[str, Any]:
    """Return the loss, and relative errors of the inputs, last layer first, and of the gradients of all converted weights."""
    torch.manual_seed(0)
    (converted.exact, autocast, moved), converted.measured = way, True
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = plain.network(data.inputs(0), use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), data.targets(0))
        dy = torch.autograd.grad(loss, converted.states[-1])
        changes = [(p, moved * torch.randn_like(p).sign()) for p in converted.parameters()]
        with torch.no_grad():
            for parameter, change in changes:
                parameter.add_(change)
            (true, _), (found, errors) = converted.backward(dy, True), converted.backward(dy, False)
            for parameter, change in changes:
                parameter.sub_(change)
    converted.exact, converted.measured = True, False
    return {"loss": loss.item(), "inputs": errors, "gradients": ((found - true).norm() / true.norm()).item()}


def run(options: argparse.Namespace, beta: float, tokens: Tensor) -> dict[str, Any]:
    """Train, or only measure, and return the record. Training stops if gradients are wrong when inputs are no longer stored."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    k, updates, ends = protocol.CELLS[0].k, options.updates, [len(tokens) * share // 10 for share in (0, 8, 9)]
    part, val = (tokens[start:end] for start, end in pairwise(ends))
    data, held_out = (
        protocol.Windows(part, protocol.WINDOWS // k, options.seed),
        protocol.Windows(val, 4, count=protocol.VALIDATION),
    )
    few = protocol.Windows(val, 2, count=protocol.VALIDATION)
    plain = protocol.Plain(options.model, Polynomial(RATE, max(updates, 1) * k, 1, protocol.WARMUP, power=1.0), k)
    layers, (first, last) = list(plain.network.model.layers), options.layers
    converted = Converted(layers[first:last], options.form)
    plain.network.model.layers = nn.ModuleList([*layers[:first], converted, *layers[last:]])
    begun, losses = time.time(), list[float]()
    record = {name: value for name, value in vars(options).items() if name not in ("model", "text", "out")}
    record |= {"beta": beta, "rate": RATE, "machine": machine()}
    if not updates:
        converted.beta = beta
        record["errors"] = {name: check(plain, converted, few, way) for name, way in WAYS.items()}
        return {**record, "val": plain.evaluate(held_out, 4)}
    for update in range(updates):
        converted.beta = beta * min(1.0, update / (0.8 * options.stored * updates)) if options.stored else beta
        if update == int(options.stored * updates):
            converted.reconstruct, record["errors"] = True, {"exact": check(plain, converted, few, WAYS["exact"])}
            if record["errors"]["exact"]["gradients"] > 1e-2:
                break
        losses.append(plain.train(data, k))
        print(f"update {update + 1}: {losses[-1]:.4f}, {time.time() - begun:.0f} s", flush=True)
    record["val"], converted.beta = plain.evaluate(held_out, protocol.VALIDATION // 4), 0.0
    record["as_plain"] = plain.evaluate(held_out, protocol.VALIDATION // 4)
    return {**record, "train": losses, "seconds": round(time.time() - begun)}


@command
def main() -> None:
    """Run what has no record, and print all."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("text", type=Path, help="text file in UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; or a file of them, which is only read")
    parser.add_argument("--form", choices=("dual", "momentum", "retrofit"), default="momentum")
    parser.add_argument("--beta", type=float, nargs="+", required=True, help="last values of β")
    parser.add_argument("--layers", type=int, nargs=2, default=(0, 12), help="first converted layer, and the one after the last")
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--stored", type=float, default=0.0, help="share of updates with stored inputs; β moves in 0.8 of them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(options.model)(options.text.read_text(encoding="utf-8"))["input_ids"])
    for beta in options.beta:
        name = f"{options.form}_b{beta:g}_l{options.layers[0]}-{options.layers[1]}_u{options.updates}_stored{options.stored:g}"
        record = recorded(options.out, f"{name}_s{options.seed}", lambda beta=beta: run(options, beta, tokens))
        print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
