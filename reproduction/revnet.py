"""Targets of the RevNet paper that compare networks: Tables 2 to 4, Fig. 3, the partitions of section 3.1 and appendix 7.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from launch.runtime.terminal import table
from petra.analysis.plots import Panel
from petra.method import Keep
from petra.model import Model
from petra.models import MODELS
from petra.models.layers import PARTITIONS
from petra.plan import make_plan
from petra.specs import TensorSpec

from .memory import PARAMETER_COPIES, activations
from .paper import REVNET_TABLE2, REVNET_TABLE3, REVNET_TABLE4
from .report import Report, Request, Scale, ran
from .runs import Run, collect, job, missing, records

CIFARS = {"cifar10": "cifar10_mean_image", "cifar100": "cifar100_mean_image"}
"""Presets of the data sets of Table 3."""
TWO_EPOCHS = ("trainer.epochs=2", "schedule.milestones=[1]", "trainer.precision=bf16")
NARROW = ("data=cifar10", "data.batch_size=100", "k=1", "model.width=0.125")
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
DEEP_IMAGES = 32
"""Images per microbatch of the 602 layers."""


def table2(request: Request) -> Report:
    """Compare the number of parameters of the eight networks (RevNet, Table 2)."""
    lines = []
    for model, row in REVNET_TABLE2.items():
        sets = ("cifar10", "cifar100") if len(row.parameters) == 2 else ("imagenet",)
        ours = [f"{_parameters(MODELS[model](classes=CLASSES[data])) / 1e6:.2f}" for data in sets]
        units, channels = ("-".join(map(str, values)) for values in (row.units, row.channels))
        printed = " / ".join(f"{value}" for value in row.parameters)
        lines.append([model, "yes" if row.bottleneck else "no", units, channels, printed, " / ".join(ours)])
    header = ("network", "bottleneck", "units", "channels", "million parameters, paper", "ours")
    note = (
        "CIFAR networks: with 10 and with 100 classes. Ours: computed at either scale. The paper leaves parts of RevNet-104 open: "
        "see `docs/evidence/paper_tables.md`."
    )
    return Report(f"{table(header, lines)}\n{note}\n", {"networks": lines})


def table3(request: Request) -> Report:
    """Compare the classification errors on CIFAR-10 and CIFAR-100 (RevNet, Table 3)."""
    smaller = "ResNet-32 and RevNet-38, 2 epochs, bf16"
    request.require_gpus(1, smaller)
    paper = request.scale is Scale.PAPER
    models = list(REVNET_TABLE3) if paper else ["resnet32", "revnet38"]
    wanted = {
        f"{data}_{model}": job(
            request,
            f"revnet_{data}_{model}",
            *("experiment=revnet/cifar10", f"data={preset}", "data.batch_size=100", f"model={model}", _method(model)),
            *(() if paper else TWO_EPOCHS),
        )
        for model in models
        for data, preset in CIFARS.items()
    }
    found = collect(request, wanted)
    lines = []
    for model, errors in REVNET_TABLE3.items():
        ours = [_error(found, f"{data}_{model}") for data in CIFARS]
        lines.append([model, *(f"{error:.2f}" for error in errors), *ours])
    header = ("network", "CIFAR-10, paper", "CIFAR-100, paper", "CIFAR-10, ours", "CIFAR-100, ours")
    note = f"Classification error in %. {ran(request, smaller)}"
    return Report(f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n", records(found))


def table4(request: Request) -> Report:
    """Compare the errors of ResNet-101 and RevNet-104 on ImageNet (RevNet, Table 4)."""
    found, text = _imagenet(request)
    lines = [[model, f"{error:.2f}", _error(found, model)] for model, error in REVNET_TABLE4.items()]
    table_text = table(("network", "top-1 error, paper, %", "ours"), lines)
    return Report(f"{table_text}{text}", records(found))


def fig3(request: Request) -> Report:
    """Show the training curves of ResNet-101 and RevNet-104 on ImageNet (RevNet, Fig. 3), from the runs of Table 4."""
    found, text = _imagenet(request)
    losses = {name: [(row["epoch"], row["train_loss"]) for row in run.rows] for name, run in found.items()}
    errors, dashed = (
        {name: [(row["epoch"], 100 - 100 * row[f"{split}_accuracy"]) for row in run.rows] for name, run in found.items()}
        for split in ("test", "train")
    )
    lines = [
        [
            name,
            f"{REVNET_TABLE4[name]:.2f}",
            f"{losses[name][-1][1]:.3f}",
            *(f"{curve[name][-1][1]:.2f}" for curve in (dashed, errors)),
        ]
        for name in found
    ]
    header = ("network", "validation error, paper, %", "train loss, ours", "train error, ours, %", "validation error, ours, %")
    panels = [Panel("epoch", "train loss", losses), Panel("epoch", "classification error (%)", errors, dashed=dashed)]
    note = "The paper prints no numbers in the figure. Solid: validation, dashed: training.\n"
    return Report(f"{table(header, lines)}{text}{note}", records(found), panels if found else ())


def partitions(request: Request) -> Report:
    """Compare four ways to divide the units of a layer into two streams (RevNet, section 3.1)."""
    smaller = "RevNet-38 on CIFAR-10, 2 epochs, bf16"
    request.require_gpus(1, smaller)
    base = ("experiment=revnet/cifar10", "model=revnet38", *(() if request.scale is Scale.PAPER else TWO_EPOCHS))
    wanted = {name: job(request, f"revnet_partition_{name}", *base, f"model.partition={name}") for name in PARTITIONS}
    found = collect(request, wanted)
    says = dict.fromkeys(PARTITIONS, "comparable to the other two") | {"channels": "consistently the best"}
    parameters = {name: f"{_parameters(MODELS['revnet38'](partition=name)) / 1e6:.2f}" for name in PARTITIONS}
    lines = [[name, says[name], parameters[name], _error(found, name)] for name in PARTITIONS]
    note = (
        "The paper states the order only (footnote 2). The streams have the same channels with every partition, and with rows, "
        f"columns and checkerboard half as many positions. {ran(request, smaller)}"
    )
    text = table(("partition", "paper", "million parameters", "test error, ours, %"), lines)
    return Report(f"{text}{missing(list(wanted), found)}\n{note}\n", records(found))


def depth(request: Request) -> Report:
    """Predict the memory that very deep networks need with stored and with reconstructed activations (RevNet, appendix 7.2)."""
    inputs = TensorSpec((DEEP_IMAGES, 3, 224, 224), torch.float32)
    lines, data = list[list[str]](), dict[str, dict[str, int]]()
    for name in ("resnet101_preact", "revnet104", "revnet602"):
        model = MODELS[name](classes=1000)
        (stage,), parts = make_plan(model, inputs, stages=1).stages, data.setdefault(name, {})
        weights = PARAMETER_COPIES * 4 * stage.parameters
        for keep in (Keep.GRAPH, Keep.NOTHING) if name.startswith("rev") else (Keep.GRAPH,):
            keeps = tuple(keep if profile.reversible or keep is Keep.GRAPH else Keep.INPUT for profile in stage.profiles)
            parts[str(keep)] = weights + sum(activations(model, replace(stage, keeps=keeps)))
        lines.append([name, f"{_parameters(model) / 1e6:.1f}", f"{weights / 1e9:.2f}"])
        lines[-1] += [f"{parts[str(keep)] / 1e9:.2f}" if str(keep) in parts else "–" for keep in (Keep.GRAPH, Keep.NOTHING)]
    header = ("network", "million parameters", "weights, gradients, momentum, GB", "activations stored, GB", "reconstructed, GB")
    note = (
        f"One process, microbatches of {DEEP_IMAGES} images of 224x224, float32, predicted at either scale. The paper trained 600 "
        "layers on one GPU (a Titan X has 12 GB) and prints no figure."
    )
    return Report(f"{table(header, lines)}\n{note}\n", data)


def _imagenet(request: Request) -> tuple[Mapping[str, Run], str]:
    """Return the runs of Table 4 and Fig. 3, and the note on them."""
    smaller = "both networks with an eighth of the channels on CIFAR-10, 2 epochs of updates of 100 images, bf16"
    request.require_gpus(1, smaller)
    presets = {"resnet101_preact": "revnet/imagenet_resnet", "revnet104": "revnet/imagenet"}
    base = () if request.scale is Scale.PAPER else (*NARROW, *TWO_EPOCHS)
    wanted = {
        model: job(request, f"revnet_imagenet_{model}", f"experiment={preset}", f"model={model}", *base)
        for model, preset in presets.items()
    }
    found = collect(request, wanted)
    return found, f"{missing(list(wanted), found)}\n{ran(request, smaller)}\n"


def _method(model: str) -> str:
    return f"method={'reversible' if model.startswith('rev') else 'backprop'}"


def _error(found: Mapping[str, Run], name: str) -> str:
    """Return the test error of a run in %, or a dash."""
    return f"{100 - 100 * found[name].summary['test_accuracy']:.2f}" if name in found else "–"


def _parameters(model: Model) -> int:
    with torch.device("meta"):
        return sum(p.numel() for block in model.blocks for p in block.build().parameters())
