"""Weight prediction with a fitted gain: forward passes use w + g·s·(change of w in the last update).

s is the staleness of the stage in updates. Plain prediction has g = 1: it assumes that the next s changes equal the last one. They
don't, and less so for Muon, whose updates have a fixed size. Here, each stage fits g to its own run, as the least-squares factor
between s times a change and the sum of the s changes that came after it:

    g = Σ_t ⟨Δ_(t+1) + … + Δ_(t+n), n·Δ_t⟩ / Σ_t ‖n·Δ_t‖²,    n = s rounded, at least 1

Both sums forget old updates by the factor ``memory``. They are taken over a sample of the weights, so that the history is small.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from petra.errors import require
from petra.staleness import WeightPrediction
from petra.staleness.step import AroundStep
from petra.torch_private import foreach_add

NUMBERS = ("numerator", "denominator", "gain")


@dataclass(frozen=True)
class FittedPrediction(WeightPrediction):
    """Predict weights for forward passes with a gain that each stage fits to its own updates."""

    prediction: Literal["difference"] = "difference"
    memory: float = 0.95
    sample: int = 1024

    def parts(self, stage, optimizer, plan, j):
        staleness = self.horizon * plan.stages[j].staleness
        require(plan.layout.tp == 1, "tp", "1 with FittedPrediction, whose samples are not divided", plan.layout.tp)
        return [_Fitted(stage, optimizer, staleness, self)] if staleness else []


class _Fitted(AroundStep):
    uses_change = True
    kind = "change"

    def __init__(self, stage, optimizer, staleness, settings):
        super().__init__(optimizer)
        self.stage, self.staleness, self.settings = stage, staleness, settings
        self.count = max(1, round(staleness))
        self.changes = deque(maxlen=self.count + 1)
        self.numerator = self.denominator = self.gain = 0.0

    def after_step(self, change):
        if self.skipped is not None and bool(self.skipped):
            self.values = self.values or change
            return
        self.values = change
        self.changes.append([self.sampled(each) for each in change])
        if len(self.changes) > self.count:
            first, *later = (torch.cat(samples) for samples in self.changes)
            predicted = self.count * first
            self.numerator = self.settings.memory * self.numerator + float(sum(later) @ predicted)
            self.denominator = self.settings.memory * self.denominator + float(predicted @ predicted)
            self.gain = min(max(self.numerator / self.denominator, 0.0), 1.0) if self.denominator else 0.0
        self.refresh()

    def numbers(self):
        return {name: getattr(self, name) for name in NUMBERS}

    def load(self, numbers):
        vars(self).update({name: float(numbers[name]) for name in NUMBERS if name in numbers})

    def tensors(self):
        samples = {f"method/sample{i:03}": self.by_parameter(each) for i, each in enumerate(self.changes)}
        return super().tensors() | samples

    def resume(self, tensors):
        self.changes.clear()
        for saved in (tensors[kind] for kind in sorted(tensors) if kind.startswith("method/sample")):
            # A parameter from a stage without staleness, on another partition, had no samples.
            self.changes.append([saved.get(p, torch.zeros_like(self.sampled(p))).to(p.device) for p in self.parameters])
        if not self.changes:
            self.numerator = self.denominator = self.gain = 0.0
        super().resume(tensors)

    def sampled(self, tensor):
        flat = tensor.flatten()
        return flat[:: max(1, flat.numel() // self.settings.sample)].float()

    @torch.no_grad()
    def refresh(self):
        ahead = self.gain * self.staleness
        predicted = foreach_add(self.parameters, self.values, alpha=ahead) if self.values else []
        self.stage.use_in_forward(self.by_parameter(list(predicted)))
