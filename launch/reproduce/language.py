"""Targets that compare methods on a language model: loss at equal tokens, at the best learning rate of each method."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, stdev
from typing import TypeVar

from petra.analysis.plots import Panel

from ..run.jobs import Job
from ..run.markdown import table
from ..run.report import read_updates
from .accuracy import SEEDS
from .report import Report, Request, ran
from .runs import Run, collect, folder_name, job, missing

Key = TypeVar("Key", bound=Hashable)
EXACT = "backprop"
TOKENS, WINDOW = 2048, 128
"""Tokens per update and per window. A microbatch has at least one window."""
RATES = ("1.5e-3", "3e-3", "6e-3")
"""Learning rates of the search."""
SEARCH_UPDATES = 128
UPDATES_BETWEEN_CHECKPOINTS = 64
STAGES = (8, 16)
SMALLER = "revgpt with 3.6 M parameters on 4,096 BPE tokens, 2,048 tokens per update"
FRESH, TWO_VERSIONS = ("method=petra", "method.delay=1"), ("method=pipedream_2bw",)
MUON, NADAM = ("optim=muon",), ("optim=nadam", "optim.betas=[0.99,0.999]")


@dataclass(frozen=True)
class Setting:
    """A way to train, as overrides of ``experiment=lm_parity``.

    Attributes:
        k: Microbatches per update; None for the number of stages, with which two versions suffice for PipeDream-2BW.
    """

    overrides: tuple[str, ...]
    k: int | None = None

    def arguments(self, stages: int, rate: str) -> tuple[str, ...]:
        """Return all overrides of a run."""
        k = self.microbatches(stages)
        return (
            *("experiment=lm_parity", *self.overrides, f"trainer.stages={stages}", f"optim.lr={rate}", f"k={k}"),
            *(f"data.batch_size={TOKENS // WINDOW // k}", f"checkpoint.every={UPDATES_BETWEEN_CHECKPOINTS * k}"),
        )

    def microbatches(self, stages: int) -> int:
        """Return k."""
        return stages if self.k is None else self.k


SMALLEST = TOKENS // WINDOW
"""k of the smallest microbatches, one window each: with the same tokens per update, they have the smallest staleness τ / k."""
SETTINGS = {
    EXACT: Setting(("method=backprop",)),
    "petra": Setting(("method=petra",)),
    "petra, d = 1": Setting(FRESH),
    "petra, d = 1, small microbatches": Setting(FRESH, SMALLEST),
    "PACI": Setting(("method=paci",)),
    "PipeDream-2BW": Setting(TWO_VERSIONS),
    "stashed NAdam": Setting(("method=pipedream", *NADAM), 1),
    f"{EXACT}, Muon": Setting(("method=backprop", *MUON)),
    "PipeDream-2BW, Muon": Setting((*TWO_VERSIONS, *MUON)),
    "PipeDream-2BW, Muon, error feedback": Setting((*TWO_VERSIONS, *MUON, "remedy=feedback")),
    "petra, d = 1, small microbatches, Muon": Setting((*FRESH, *MUON), SMALLEST),
    "petra, d = 1, small microbatches, Muon, error feedback": Setting((*FRESH, *MUON, "remedy=feedback"), SMALLEST),
    "petra, d = 1, small microbatches, Muon, prediction": Setting((*FRESH, *MUON, "remedy=prediction_difference"), SMALLEST),
    "petra, d = 1, small microbatches, SpecTrain's prediction": Setting((*FRESH, "remedy=spectrain"), SMALLEST),
    "petra, d = 1, small microbatches, basis rotation": Setting((*FRESH, "optim=basis_rotation"), SMALLEST),
}


def search(request: Request) -> Report:
    """Train every setting briefly at each learning rate, with one seed."""
    searched = _search(request)
    lines = []
    for stages, name in product(STAGES, SETTINGS):
        losses = {rate: _loss(searched[stages, name, rate]) for rate in RATES if (stages, name, rate) in searched}
        if losses:
            setting = SETTINGS[name]
            overrides = f"`{' '.join(setting.overrides)} k={setting.microbatches(stages)}`"
            cells = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in RATES]
            lines.append([str(stages), name, overrides, *cells, min(losses, key=lambda rate: losses[rate])])
    header = ("stages", "setting", "overrides", *(f"test loss at {rate}" for rate in RATES), "best rate")
    note = f"{SEARCH_UPDATES} updates, one seed. {ran(request, SMALLER)}"
    text = f"{table(header, lines)}{_missing(_search_jobs(request), searched)}\n{note}\n"
    return Report(text, _records(searched), _curves({key[:2]: run for key, run in searched.items()}), columns=1)


def parity(request: Request) -> Report:
    """Train every setting for an epoch with three seeds, at the learning rate that is best in the search.

    With --gather, settings without finished runs of the search are left out.
    """
    best: dict[tuple[int, str], tuple[float, str]] = {}
    for (stages, name, rate), run in _search(request).items():
        best[stages, name] = min(best.get((stages, name), (float("inf"), rate)), (_loss(run), rate))
    wanted = {
        (stages, name, seed): job(
            request, f"lm_{stages}_{folder_name(name)}_s{seed}", *SETTINGS[name].arguments(stages, rate), f"seed={seed}"
        )
        for (stages, name), (_, rate) in best.items()
        for seed in SEEDS
    }
    found = _collected(request, wanted)
    groups = {group: [found[*group, seed] for seed in SEEDS if (*group, seed) in found] for group in best}
    groups = {group: runs for group, runs in groups.items() if runs}
    lines = [
        [str(stages), name, best[stages, name][1], *_cells(groups, stages, name), str(len(runs))]
        for (stages, name), runs in groups.items()
    ]
    header = ("stages", "setting", "learning rate", "test loss", "bits per byte", "above backprop, %", "seeds")
    note = f"One epoch, mean ± standard deviation over seeds. {ran(request, SMALLER)}"
    text = f"{table(header, lines)}{_missing(wanted, found)}\n{note}\n"
    return Report(text, _records(found), _curves({group: runs[0] for group, runs in groups.items()}), columns=1)


def _search(request: Request) -> dict[tuple[int, str, str], Run]:
    return _collected(request, _search_jobs(request))


def _search_jobs(request: Request) -> dict[tuple[int, str, str], Job]:
    """Return the runs of the search by number of stages, setting and learning rate."""
    jobs = {}
    for stages, name, rate in product(STAGES, SETTINGS, RATES):
        setting = SETTINGS[name]
        limit = f"trainer.limit_batches={SEARCH_UPDATES * setting.microbatches(stages)}"
        jobs[stages, name, rate] = job(
            request, f"lm_search_{stages}_{folder_name(name)}_{rate}", *setting.arguments(stages, rate), limit
        )
    return jobs


def _collected(request: Request, wanted: Mapping[Key, Job]) -> dict[Key, Run]:
    """Train the unfinished runs, which need the arguments of the target, and return all by key."""
    request.require_gpus(1, SMALLER)
    names = {job.folder.name: key for key, job in wanted.items()}
    return {names[name]: run for name, run in collect(request, {job.folder.name: job for job in wanted.values()}).items()}


def _missing(wanted: Mapping[Key, Job], found: Mapping[Key, Run]) -> str:
    return missing([job.folder.name for job in wanted.values()], {str(key): run for key, run in found.items()})


def _cells(groups: Mapping[tuple[int, str], Sequence[Run]], stages: int, name: str) -> list[str]:
    """Return loss, bits per byte, and the percentage by which the loss exceeds that of backpropagation with any optimizer."""
    losses = [_loss(run) for run in groups[stages, name]]
    bits = [run.rows[-1].get("test_bits_per_byte") for run in groups[stages, name]]
    known = [value for value in bits if value is not None]
    exact = [mean(_loss(run) for run in runs) for (_, other), runs in groups.items() if other.startswith(EXACT)]
    above = "" if not exact or name.startswith(EXACT) else f"{100 * (mean(losses) / min(exact) - 1):.2f}"
    return [_mean(losses), _mean(known) if known else "", above]


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _loss(run: Run) -> float:
    return float(run.summary["test_loss"])


def _records(found: Mapping[Key, Run]) -> dict[str, object]:
    return {run.folder.name: run.record() for run in found.values()}


def _curves(runs: Mapping[tuple[int, str], Run]) -> list[Panel]:
    """Return a diagram for each number of stages: training loss against tokens, one run of each setting."""
    panels = []
    for stages in STAGES:
        curves = {
            name: [(row["updates"] * TOKENS / 1e6, row["update/loss"]) for row in read_updates(run.folder)]
            for (count, name), run in runs.items()
            if count == stages
        }
        if curves:
            panels.append(Panel(f"million tokens, {stages} stages", "training loss", curves))
    return panels


def reached(request: Request) -> dict[str, float]:
    """Return, for each setting with 8 stages, the tokens that it needs to a loss, relative to backpropagation with AdamW.

    The loss is the training loss of backpropagation at the end of the run, averaged over its last eighth. Settings that do not
    reach it, or without a finished run, are left out. The longest available run of each setting at its best learning rate counts.
    """
    searched = _search(replace(request, gather=True))
    best: dict[str, Run] = {}
    for (stages, name, _), run in searched.items():
        if stages == STAGES[0] and (name not in best or _loss(run) < _loss(best[name])):
            best[name] = run
    if EXACT not in best:
        return {}
    rows = read_updates(best[EXACT].folder)
    goal = mean(row["update/loss"] for row in rows[-max(1, len(rows) // 8) :])
    found = {name: _tokens_to(goal, run) for name, run in best.items()}
    exact = found[EXACT]
    return {name: tokens / exact for name, tokens in found.items() if tokens is not None and exact is not None}


def _tokens_to(goal: float, run: Run) -> float | None:
    """Return the tokens after which the training loss, averaged over an eighth of the run, is at most ``goal``."""
    rows = read_updates(run.folder)
    window = max(1, len(rows) // 8)
    for i in range(window, len(rows) + 1):
        if mean(row["update/loss"] for row in rows[i - window : i]) <= goal:
            return float(rows[i - 1]["updates"] * TOKENS)
    return None
