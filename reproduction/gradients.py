"""Targets that compare gradients during training: PETRA's Fig. 5 and 6, RevNet's Fig. 4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

from launch.runtime.terminal import table
from petra.analysis.plots import Panel, by_stage
from petra.errors import invalid, require

from .accuracy import QUARTER_WIDTH, SIX_EPOCHS
from .paper import FIG5_PER_EPOCH, FIG5_WINDOW, FIG6_EPOCHS, REVNET_FIG4_EXTRA_EPOCHS
from .report import Report, Request, Scale, ran
from .runs import Run, collect, job, records

Row = dict[str, float]
ByStage = dict[int, dict[int, Row]]
"""Means of the measurements in an epoch, by stage and epoch, both from 1."""
CIFAR_EPOCH = 781
"""Microbatches of 64 images in an epoch of CIFAR-10."""
SMALLER = f"{QUARTER_WIDTH}, k = 1, 6 epochs"
REFERENCES = (
    "The end-to-end gradient uses the weights at the time when the microbatch reaches the loss, and all parameters of a stage form "
    "one vector. The authors' program uses the weights at the time of the stage's backward, and averages over a stage's tensors."
)
PAIRS = {"end_to_end": "PETRA to end-to-end", "delayed": "PETRA to delayed", "delayed_end_to_end": "delayed to end-to-end"}


def fig5(request: Request) -> Report:
    """Compare PETRA's gradient with the delayed and the end-to-end gradient, by stage and epoch (PETRA, Fig. 5).

    Each point is the mean of 15 measurements in one epoch. Lines are moving averages over 10 epochs at scale=paper.
    """
    run, epochs = _diagnosed_run(request)
    window = FIG5_WINDOW if request.scale is Scale.PAPER else 1

    def lines(key: str) -> dict[str, list[tuple[float, float]]]:
        return {f"stage {stage}": smoothed([(e, row[key]) for e, row in rows.items()], window) for stage, rows in epochs.items()}

    diagrams = [
        Panel("epoch", "cosine, PETRA to delayed", lines("cosine_delayed")),
        Panel("epoch", "cosine to end-to-end", lines("cosine_end_to_end"), dashed=lines("cosine_delayed_end_to_end")),
        Panel("epoch", "norm ratio, PETRA / delayed", lines("norm_ratio_delayed")),
        Panel("epoch", "norm ratio to end-to-end", lines("norm_ratio_end_to_end"), dashed=lines("norm_ratio_delayed_end_to_end")),
    ]
    keys = [f"{quantity}_{pair}" for quantity in ("cosine", "norm_ratio") for pair in PAIRS]
    header = ("stage", *(f"{quantity}, {pair}" for quantity in ("cosine", "norm ratio") for pair in PAIRS.values()))
    means = {stage: {key: mean(row[key] for row in rows.values()) for key in keys} for stage, rows in epochs.items()}
    table5 = table(header, [[str(stage), *(f"{row[key]:.3f}" for key in keys)] for stage, row in means.items()])
    note = (
        f"Mean over all epochs. Solid lines are PETRA's gradient, dashed lines the delayed gradient; moving average over {window} "
        f"epoch(s), {FIG5_PER_EPOCH} measurements in each. {REFERENCES} {ran(request, SMALLER)}"
    )
    text = f"{table(('the paper says', 'ours'), _claims(epochs, means))}\n{table5}\n{note}\n"
    return Report(text, {"epochs": epochs, "run": records({"petra": run})}, diagrams, shaded=True)


def fig6(request: Request) -> Report:
    """Show the cosines of Fig. 5 against the stage at four epochs, from the same run (PETRA, Fig. 6)."""
    run, epochs = _diagnosed_run(request)
    chosen = compared_epochs(len(run.rows))
    measured = {epoch for rows in epochs.values() for epoch in rows}
    for epoch in chosen:
        require(epoch in measured, "trainer.diagnose", f"a measurement in epoch {epoch} of {run.folder}", "none")
    lines, diagrams = [], []
    for published, epoch in zip(FIG6_EPOCHS, chosen, strict=True):
        found = {name: [(stage, rows[epoch][f"cosine_{pair}"]) for stage, rows in epochs.items()] for pair, name in PAIRS.items()}
        diagrams.append(Panel("stage", f"cosine, epoch {epoch}", found))
        for name, points in found.items():
            lines.append([str(published), str(epoch), name, *(f"{cosine:.3f}" for _, cosine in points)])
    header = ("epoch in the paper", "epoch", "cosine", *(f"stage {stage}" for stage in epochs))
    note = f"The paper prints no numbers. Means of {FIG5_PER_EPOCH} measurements in one epoch. {REFERENCES} {ran(request, SMALLER)}"
    return Report(f"{table(header, lines)}\n{note}\n", {"epochs": epochs, "run": records({"petra": run})}, diagrams)


def compared_epochs(epochs: int) -> list[int]:
    """Return the epochs of Fig. 6 for a run of this length: 25, 125, 175 and 250 of 300. A short run has its last epoch for 250."""
    *early, last = FIG6_EPOCHS
    return [*(math.ceil(e * epochs / 300) for e in early), last if epochs == 300 else epochs]


def smoothed(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the points with the moving average over the last ``window`` values, or over fewer at the beginning."""
    return [(x, mean(y for _, y in points[max(i + 1 - window, 0) : i + 1])) for i, (x, _) in enumerate(points)]


def _claims(epochs: ByStage, means: Mapping[int, Mapping[str, float]]) -> list[list[str]]:
    """Return what appendix B of the paper says about Fig. 5, with our figures."""
    closer = sum(row["cosine_end_to_end"] > row["cosine_delayed_end_to_end"] for row in means.values())
    smaller = sum(row["norm_ratio_end_to_end"] < row["norm_ratio_delayed_end_to_end"] for row in means.values())
    first, last = next(iter(epochs.values())), list(means.values())[-1]
    begin, end = first[min(first)], first[max(first)]
    farthest = max((row["norm_ratio_delayed"] for row in means.values()), key=lambda ratio: abs(ratio - 1))
    return [
        ["PETRA is closer to end-to-end than delayed is", f"at {closer} of {len(means)} stages"],
        ["its norm ratio to end-to-end is smaller", f"at {smaller} of {len(means)} stages"],
        ["PETRA / delayed norms stay close to 1", f"farthest mean: {farthest:.3f}"],
        [
            "alignment improves during training",
            f"stage 1, PETRA to delayed: {begin['cosine_delayed']:.3f} in the first epoch, {end['cosine_delayed']:.3f} in the last",
        ],
        [
            "alignment is better at later stages",
            f"PETRA to end-to-end: {next(iter(means.values()))['cosine_end_to_end']:.3f} at the first stage, "
            f"{last['cosine_end_to_end']:.3f} at the last",
        ],
    ]


def revnet_fig4(request: Request) -> Report:
    """Measure the angle between the gradients from reconstructed and from stored activations, and train with both (RevNet, Fig. 4).

    The gradient is that of the whole network.
    """
    smaller = "RevNet-38 on CIFAR-10, 2 epochs, 1 more with reconstructed activations"
    request.require_gpus(1, smaller)
    base: tuple[str, ...]
    if request.scale is Scale.PAPER:
        base, longer = ("model=revnet164", "trainer.epochs=160"), (f"trainer.epochs={160 + REVNET_FIG4_EXTRA_EPOCHS}",)
        diagnose = "trainer.diagnose=1000"
    else:
        base, longer = ("model=revnet38", "trainer.epochs=2", "schedule.milestones=[1]"), ("trainer.epochs=3",)
        diagnose = "trainer.diagnose=50"
    base = ("experiment=revnet/cifar10", *base, "trainer.stages=1")
    wanted = {
        "reversible": job(request, "revnet_reversible", *base, *longer, "method=reversible", diagnose),
        "backprop": job(request, "revnet_backprop", *base, "method=backprop"),
    }
    found = collect(request, wanted)
    run = _required(found, "reversible")
    rows = _rows(run)
    angles = [[f"{row['microbatch']:.0f}", f"{row['angle_stored']:.2g}"] for row in _sample(rows)]
    common = min(len(run.rows) for run in found.values())
    reached = [
        [name, str(epochs), f"{run.rows[epochs - 1]['train_loss']:.4f}", f"{100 * run.rows[epochs - 1]['test_accuracy']:.2f}"]
        for name, run in found.items()
        for epochs in sorted({common, len(run.rows)})
    ]
    header = ("method", "epochs", "train loss", "test accuracy, %")
    text = table(("microbatch", "angle, degrees"), angles) + "\n" + table(header, reached)
    losses = {name: [(row["epoch"], row["train_loss"]) for row in run.rows] for name, run in found.items()}
    accuracies = {name: [(row["epoch"], 100 * row["test_accuracy"]) for row in run.rows] for name, run in found.items()}
    diagrams = [
        Panel("microbatch", "angle (degrees)", {"reversible": by_stage(rows, "angle_stored")["stage 1"]}, "symlog"),
        Panel("epoch", "train loss", losses),
        Panel("epoch", "test accuracy (%)", accuracies),
    ]
    note = (
        "`backprop` stores the activations of the same network. The paper prints no numbers: the angle grows during training, "
        f"stays below about 10 degrees, and both trainings agree. {ran(request, smaller)}"
    )
    data = {"rows": rows, "runs": records(found)}
    return Report(f"{text}\n{note}\n", data, diagrams, columns=3)


def _diagnosed_run(request: Request) -> tuple[Run, ByStage]:
    """Return the run that Fig. 5 and 6 share, and the means of its diagnosis."""
    request.require_gpus(1, SMALLER)
    base = ("experiment=petra/cifar10", "model=revnet18") if request.scale is Scale.PAPER else SIX_EPOCHS
    diagnose = f"trainer.diagnose={CIFAR_EPOCH // FIG5_PER_EPOCH}"
    wanted = {"petra": job(request, "gradients_petra", *base, "method=petra", "k=1", diagnose)}
    run = _required(collect(request, wanted), "petra")
    return run, epoch_means(_rows(run), run.rows[0]["microbatches"])


def epoch_means(rows: Sequence[Row], microbatches: int) -> ByStage:
    """Return the mean of all quantities by stage and epoch, for the stages with parameters."""
    groups: dict[int, dict[int, list[Row]]] = {}
    for row in rows:
        if "cosine_delayed" in row:
            ratio = row["norm_ratio_end_to_end"] / row["norm_ratio_delayed"]
            epoch = int(row["microbatch"] // microbatches) + 1
            groups.setdefault(int(row["stage"]), {}).setdefault(epoch, []).append(row | {"norm_ratio_delayed_end_to_end": ratio})
    return {
        stage: {epoch: {key: mean(row[key] for row in found) for key in found[0]} for epoch, found in sorted(by_epoch.items())}
        for stage, by_epoch in sorted(groups.items())
    }


def _required(found: Mapping[str, Run], name: str) -> Run:
    if name not in found:
        raise invalid("--gather", "a finished run with these settings and trainer.diagnose in --out or --runs", "none")
    return found[name]


def _rows(run: Run) -> Sequence[Row]:
    """Return the rows that the diagnosis wrote.

    Raises:
        ConfigError: If there are none.
    """
    require(bool(run.gradients), "--runs", "runs with trainer.diagnose, which write gradients.jsonl", f"{run.folder} without it")
    return run.gradients


def _sample(rows: Sequence[Row], count: int = 10) -> list[Row]:
    """Return about ``count`` rows at equal distances, with the first and the last."""
    step = max(1, math.ceil((len(rows) - 1) / (count - 1)))
    return [*rows[:-1:step], rows[-1]]
