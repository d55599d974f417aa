"""Targets that compare methods on a language model: loss at equal tokens, at the best learning rate of each method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, stdev
from typing import TypeVar

from petra.analysis.plots import Panel

from ..run.jobs import Job
from ..run.markdown import table
from ..run.report import read_gradients, read_updates
from .accuracy import SEEDS
from .report import Report, Request, ran
from .runs import Run, collect, folder_name, job, missing

Key = TypeVar("Key", bound=Hashable)
EXACT = "backprop"
TOKENS, WINDOW = 2048, 128
"""Tokens per update and per window. A microbatch has at least one window."""
RATES = ("7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2")
"""Learning rates of the search."""
SEARCH_UPDATES, PARITY_UPDATES, LONG_EPOCHS = 128, 768, 2
"""Length of the runs of each target. Two epochs of the corpus in docs/language_models.md are 7,230 updates."""
UPDATES_BETWEEN_CHECKPOINTS = 64
DIAGNOSE = "trainer.diagnose=203"
"""203 has no factor in common with k, so gradients are compared at all places of a microbatch in its update."""
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
EXACT_MUON = f"{EXACT}, Muon"
SMALL_FEEDBACK = "petra, small microbatches, Muon, error feedback"
FRESH_FEEDBACK = "petra, d = 1, small microbatches, Muon, error feedback"
TWO_VERSIONS_FEEDBACK = "PipeDream-2BW, Muon, error feedback"
STASHED_NADAM = "stashed NAdam"
SETTINGS = {
    EXACT: Setting(("method=backprop",)),
    "petra": Setting(("method=petra",)),
    "petra, d = 1": Setting(FRESH),
    "petra, d = 1, small microbatches": Setting(FRESH, SMALLEST),
    "PACI": Setting(("method=paci",)),
    "PipeDream-2BW": Setting(TWO_VERSIONS),
    STASHED_NADAM: Setting(("method=pipedream", *NADAM), 1),
    EXACT_MUON: Setting(("method=backprop", *MUON)),
    "PipeDream-2BW, Muon": Setting((*TWO_VERSIONS, *MUON)),
    TWO_VERSIONS_FEEDBACK: Setting((*TWO_VERSIONS, *MUON, "remedy=feedback")),
    "petra, small microbatches, Muon": Setting(("method=petra", *MUON), SMALLEST),
    "petra, small microbatches, Muon, prediction": Setting(("method=petra", *MUON, "remedy=prediction_difference"), SMALLEST),
    SMALL_FEEDBACK: Setting(("method=petra", *MUON, "remedy=feedback"), SMALLEST),
    "petra, d = 1, small microbatches, Muon": Setting((*FRESH, *MUON), SMALLEST),
    FRESH_FEEDBACK: Setting((*FRESH, *MUON, "remedy=feedback"), SMALLEST),
    "petra, d = 1, small microbatches, Muon, prediction": Setting((*FRESH, *MUON, "remedy=prediction_difference"), SMALLEST),
    "petra, d = 1, small microbatches, SpecTrain's prediction": Setting((*FRESH, "remedy=spectrain"), SMALLEST),
    "petra, d = 1, small microbatches, basis rotation": Setting((*FRESH, "optim=basis_rotation"), SMALLEST),
}

FINALISTS = (EXACT, EXACT_MUON, "petra", SMALL_FEEDBACK, FRESH_FEEDBACK, TWO_VERSIONS_FEEDBACK, STASHED_NADAM)
"""Settings with three seeds: backpropagation, PETRA as published, our best, and rivals."""
LONGEST = (EXACT_MUON, "petra", SMALL_FEEDBACK)
"""Backpropagation, PETRA as published, and the best setting that is as fast as PETRA on all links."""
STDS, STD_RATE = ("0.02", "0.2", "0.4", "1.0"), "6e-3"
"""Standard deviations of the initial embedding and the learning rate of ``embedding``. GPT-2's deviation is 0.02."""
MEASURED = (
    *("test loss", "bits per byte", "above backprop, %"),
    *("staleness, updates", "drift of weights, %", "cosine, stage 1", "smallest cosine"),
)
"""Columns of runs of ``parity``, see ``_cells``."""


def search(request: Request) -> Report:
    """Train every setting briefly at each learning rate, with one seed."""
    searched = _search(request, tuple(SETTINGS))
    best, lines = _best_of(searched), []
    for stages, name in product(STAGES, SETTINGS):
        losses = {rate: _loss(searched[stages, name, rate]) for rate in RATES if (stages, name, rate) in searched}
        if losses:
            setting = SETTINGS[name]
            overrides = f"`{' '.join(setting.overrides)} k={setting.microbatches(stages)}`"
            cells = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in RATES]
            lines.append([str(stages), name, overrides, *cells, best[stages, name]])
    header = ("stages", "setting", "overrides", *(f"test loss at {rate}" for rate in RATES), "best rate")
    note = f"{SEARCH_UPDATES} updates, one seed. The figure shows the finalists at their best rates. {ran(request, SMALLER)}"
    text = f"{table(header, lines)}{_missing(_search_jobs(request, tuple(SETTINGS)), searched)}\n{note}\n"
    drawn = {(stages, name): searched[stages, name, rate] for (stages, name), rate in best.items() if name in FINALISTS}
    return Report(text, _records(searched), _curves(drawn), columns=1)


def parity(request: Request) -> Report:
    """Train the finalists on the same tokens with three seeds, at the learning rate that is best with the first seed.

    With --gather, settings without finished runs are left out.
    """
    best = _best_of(_first_finals(request, FINALISTS))
    wanted = {(*group, seed): _final(request, *group, rate, seed) for group, rate in best.items() for seed in SEEDS}
    found = _collected(request, wanted)
    groups = {group: [found[*group, seed] for seed in SEEDS if (*group, seed) in found] for group in best}
    groups = {group: runs for group, runs in groups.items() if runs}
    lines = [
        [str(stages), name, best[stages, name], *_cells(groups, stages, name), str(len(runs))]
        for (stages, name), runs in groups.items()
    ]
    header = ("stages", "setting", "learning rate", *MEASURED, "seeds")
    note = (
        f"{PARITY_UPDATES} updates, {PARITY_UPDATES * TOKENS / 1e6:.1f} million tokens; mean ± standard deviation over seeds. "
        "*Above backprop* compares with its best setting on the same seeds. "
        "Staleness and drift are those of the first stage, from forward to backward. "
        "Cosines are those of a stage's gradient to the end-to-end gradient, a mean over the second half of the training. "
        f"{ran(request, SMALLER)}"
    )
    text = f"{table(header, lines)}{_missing(wanted, found)}\n{note}\n"
    firsts = {group: runs[0] for group, runs in groups.items()}
    return Report(text, _records(found), [*_curves(firsts), *_cosine_panels(groups)])


def longer(request: Request) -> Report:
    """Train backpropagation, PETRA as published and our best setting with d = 2 nine times as long, with 8 stages and one seed."""
    best = _best_of(_first_finals(request, LONGEST))
    wanted = {
        (STAGES[0], name): job(
            request,
            f"lm_long_{folder_name(name)}",
            *SETTINGS[name].arguments(STAGES[0], best[STAGES[0], name]),
            f"trainer.epochs={LONG_EPOCHS}",
            DIAGNOSE,
        )
        for name in LONGEST
        if (STAGES[0], name) in best
    }
    found = _collected(request, wanted)
    lines = [
        [name, best[stages, name], *_cells({key: [run] for key, run in found.items()}, stages, name)] for stages, name in found
    ]
    header = ("setting", "learning rate", *MEASURED)
    note = f"{LONG_EPOCHS} epochs, {STAGES[0]} stages, one seed. {ran(request, SMALLER)}"
    return Report(f"{table(header, lines)}{_missing(wanted, found)}\n{note}\n", _records(found), _curves(found), columns=1)


def embedding(request: Request) -> Report:
    """Train backpropagation and PETRA with d = 1 with embeddings of different scale, as long as ``parity``, with one seed."""
    compared = ((STAGES[0], EXACT_MUON), (STAGES[-1], FRESH_FEEDBACK))
    wanted = {
        (std, *group): _final(request, *group, STD_RATE, SEEDS[0], f"model.embedding_std={std}")
        for std in STDS
        for group in compared
    }
    found = _collected(request, wanted)
    by_std = {std: {group: [found[std, *group]] for group in compared if (std, *group) in found} for std in STDS}
    lines = [[std, str(stages), name, *_cells(groups, stages, name)] for std, groups in by_std.items() for stages, name in groups]
    note = f"{PARITY_UPDATES} updates, learning rate {STD_RATE}, one seed. {ran(request, SMALLER)}"
    text = f"{table(('embedding_std', 'stages', 'setting', *MEASURED), lines)}{_missing(wanted, found)}\n{note}\n"
    stale = compared[1]
    curves = {(stale[0], f"embedding_std {std}"): groups[stale] for std, groups in by_std.items() if stale in groups}
    return Report(text, _records(found), _cosine_panels(curves), columns=1)


def _final(request: Request, stages: int, name: str, rate: str, seed: int, *more: str) -> Job:
    """Return a run of ``parity``, with more overrides."""
    setting = SETTINGS[name]
    limit = f"trainer.limit_batches={PARITY_UPDATES * setting.microbatches(stages)}"
    folder = "_".join(("lm", str(stages), folder_name(name), rate, f"s{seed}", *map(folder_name, more)))
    return job(request, folder, *setting.arguments(stages, rate), limit, f"seed={seed}", DIAGNOSE, *more)


def _first_finals(request: Request, names: Sequence[str]) -> dict[tuple[int, str, str], Run]:
    """Return the runs of ``parity`` with the first seed, by number of stages, setting and learning rate.

    Longer runs prefer lower rates, so the rates of a setting begin at the best one of the search and fall while the loss does.
    """
    found: dict[tuple[int, str, str], Run] = {}
    rates = _best_of(_search(request, names))
    while rates:
        wanted = {(*group, rate): _final(request, *group, rate, SEEDS[0]) for group, rate in rates.items()}
        found |= _collected(request, wanted)
        best = _best_of(found)
        rates = {
            group: RATES[RATES.index(rate) - 1]
            for group, rate in rates.items()
            if rate != RATES[0] and best.get(group, rate) == rate
        }
    return found


def _best_of(searched: Mapping[tuple[int, str, str], Run]) -> dict[tuple[int, str], str]:
    """Return the learning rate with the smallest test loss, by number of stages and setting."""
    best: dict[tuple[int, str], tuple[float, str]] = {}
    for (stages, name, rate), run in searched.items():
        best[stages, name] = min(best.get((stages, name), (float("inf"), rate)), (_loss(run), rate))
    return {group: rate for group, (_, rate) in best.items()}


def _search(request: Request, names: Sequence[str]) -> dict[tuple[int, str, str], Run]:
    return _collected(request, _search_jobs(request, names))


def _search_jobs(request: Request, names: Sequence[str]) -> dict[tuple[int, str, str], Job]:
    """Return the runs of the search by number of stages, setting and learning rate."""
    jobs = {}
    for stages, name, rate in product(STAGES, names, RATES):
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
    """Return the cells of a setting from loss to cosine: means over its runs, and the excess over backpropagation's loss."""
    runs = groups[stages, name]
    losses = [_loss(run) for run in runs]
    last = [run.rows[-1] for run in runs]
    exact = [found for (_, other), found in groups.items() if other.startswith(EXACT)]
    above = "" if name.startswith(EXACT) else _excess(runs, min(exact, key=_mean_loss, default=()))
    cosines = _cosines(runs)
    return [
        *(_mean(losses), _known([row.get("test_bits_per_byte") for row in last], _mean), above),
        _known([row.get("stage/1/staleness") for row in last], lambda found: f"{mean(found):.2g}"),
        _known([_drift(run) for run in runs], lambda found: f"{100 * mean(found):.2f}"),
        *((f"{cosines[min(cosines)]:.3f}", f"{min(cosines.values()):.3f}") if cosines else ("", "")),
    ]


def _excess(runs: Sequence[Run], exact: Sequence[Run]) -> str:
    """Return by how many per cent the loss of runs exceeds that of the exact runs with the same seeds, or "" if there are none."""
    by_seed = {run.summary["seed"]: _loss(run) for run in exact}
    pairs = [(_loss(run), by_seed[run.summary["seed"]]) for run in runs if run.summary["seed"] in by_seed]
    return f"{100 * (sum(loss for loss, _ in pairs) / sum(loss for _, loss in pairs) - 1):.2f}" if pairs else ""


def _drift(run: Run) -> float | None:
    """Return the mean drift of the first stage over the whole run, which may have been interrupted; None if it was not measured."""
    drifts = [row["update/weight_drift"] for row in read_updates(run.folder) if "update/weight_drift" in row]
    return mean(drifts) if drifts else None


def _known(values: Sequence[float | None], write: Callable[[Sequence[float]], str]) -> str:
    known = [value for value in values if value is not None]
    return write(known) if known else ""


def _cosines(runs: Sequence[Run]) -> dict[int, float]:
    """Return the mean cosine of each stage's gradient to the end-to-end gradient in the second half of the runs."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for row in read_gradients(run.folder):
            if row["microbatch"] >= run.rows[-1]["microbatches"] / 2 and "cosine_end_to_end" in row:
                found.setdefault(int(row["stage"]), []).append(row["cosine_end_to_end"])
    return {stage: mean(cosines) for stage, cosines in sorted(found.items())}


def _cosine_panels(groups: Mapping[tuple[int, str], Sequence[Run]]) -> list[Panel]:
    """Return a diagram for each number of stages: cosine to the end-to-end gradient against the stage."""
    panels = []
    for stages in STAGES:
        cosines = {name: _cosines(runs) for (count, name), runs in groups.items() if count == stages and not name.startswith(EXACT)}
        lines = {name: list(found.items()) for name, found in cosines.items() if found}
        if lines:
            panels.append(Panel(f"stage, of {stages}", "cosine to the end-to-end gradient", lines))
    return panels


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _loss(run: Run) -> float:
    return float(run.summary["test_loss"])


def _mean_loss(runs: Sequence[Run]) -> float:
    return mean(_loss(run) for run in runs)


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
    """Return, for each setting with 8 stages, the tokens that it needs to a loss, relative to the best backpropagation.

    The loss is 1.01 times the lowest training loss of backpropagation at the end of its run. Training losses are means over an
    eighth of the run. The runs are those of ``parity`` with the first seed, or if there are none, those of the search. Settings
    that do not reach the loss are left out.
    """
    request = replace(request, gather=True)
    names = tuple(SETTINGS)
    runs = _with_best_rates(_first_finals(request, names))
    if not any(name.startswith(EXACT) for name in runs):
        runs = _with_best_rates(_search(request, names))
    smooth = {name: _smoothed_losses(run) for name, run in runs.items()}
    ends = {name: losses[-1][1] for name, losses in smooth.items() if name.startswith(EXACT)}
    if not ends:
        return {}
    goal = 1.01 * min(ends.values())
    tokens = {name: next((tokens for tokens, loss in losses if loss <= goal), None) for name, losses in smooth.items()}
    exact = tokens[min(ends, key=lambda name: ends[name])]
    return {name: found / exact for name, found in tokens.items() if found is not None and exact is not None}


def _with_best_rates(runs: Mapping[tuple[int, str, str], Run]) -> dict[str, Run]:
    """Return the run of each setting with 8 stages and its best learning rate."""
    return {name: runs[stages, name, rate] for (stages, name), rate in _best_of(runs).items() if stages == STAGES[0]}


def _smoothed_losses(run: Run) -> list[tuple[float, float]]:
    """Return the tokens so far and the training loss averaged over the last eighth of the run."""
    rows = read_updates(run.folder)
    window = max(1, len(rows) // 8)
    return [
        (float(rows[i - 1]["updates"] * TOKENS), mean(row["update/loss"] for row in rows[i - window : i]))
        for i in range(window, len(rows) + 1)
    ]
