"""Measure time and stored bytes of one BN + ACT + CONV block in the four module shapes of ResNeXt-101, and of whole networks.

Compares standard layers, InPlace-ABN, and the authors' package ``inplace-abn`` if it is installed, as in Fig. 4 of Rota Bulò et al.
2018. The block's input is the result of another operation, as in a network. Networks with batch norm and leaky ReLU are compared
with what ``to_inplace_abn`` makes of them.

python -m benchmarks.inplace_abn --out runs/inplace_abn.json
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import alternate, benchmark_parser, kept_bytes, ratio, save, spread
from petra.inplace_abn import InPlaceABN, to_inplace_abn
from petra.models import MODELS

# Channels and image side of the 3x3 convolutions for images of 224x224 pixels (Xie et al. 2017, Table 1: 32x4d).
SHAPES = {"module 1": (128, 56), "module 2": (256, 28), "module 3": (512, 14), "module 4": (1024, 7)}
GROUPS = 32
NETWORKS = {
    "resnet50": {"stem": "imagenet"},
    "resnext101": {"stem": "imagenet"},
    "resnext152": {"stem": "imagenet"},
    "wide_resnet38": {},
    "revnet50": {"stem": "imagenet"},
}
STANDARD = "standard"


def blocks(channels: int) -> dict[str, nn.Module]:
    """Return BN + ACT + CONV blocks by name, with the same weights."""
    variants = {
        STANDARD: nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01, inplace=True), conv(channels)),
        "InPlace-ABN": nn.Sequential(InPlaceABN(channels), conv(channels)),
    }
    if importlib.util.find_spec("inplace_abn") is not None:
        package = importlib.import_module("inplace_abn")
        variants["inplace-abn package"] = nn.Sequential(package.InPlaceABN(channels), conv(channels))
    weights = list(variants[STANDARD].parameters())
    for module in variants.values():
        with torch.no_grad():
            for p, w in zip(module.parameters(), weights, strict=True):
                p.copy_(w)
    return variants


def conv(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1, groups=GROUPS, bias=False)


class Contestant:
    """A block with an input and a gradient of its output."""

    def __init__(self, block: nn.Module, x: Tensor, delta: Tensor, channels_last: bool) -> None:
        form = torch.channels_last if channels_last else torch.contiguous_format
        self.block = block.to(memory_format=form)
        self.x, self.delta = x.contiguous(memory_format=form), delta.contiguous(memory_format=form)

    def step(self, repeats: int) -> float:
        """Return the mean seconds of a forward and a backward of the block, without the computation of its input."""
        seconds = 0.0
        for _ in range(repeats):
            x = _Fresh.apply(self.x.requires_grad_())
            start = time.perf_counter()
            out = self.block(x)
            torch.autograd.grad(out, [self.x, *self.block.parameters()], self.delta)
            seconds += time.perf_counter() - start
            del out
        return seconds / repeats

    def kept(self) -> int:
        """Return the bytes that the block stores for its backward."""
        return kept_bytes(lambda: self.block(_Fresh.apply(self.x.requires_grad_())), self.block.parameters())


class _Fresh(torch.autograd.Function):
    """A copy in place of a convolution's result. No other operation needs it, and its gradient costs nothing."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dx: Tensor) -> Tensor:
        return dx


def measure(channels: int, pixels: int, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Return seconds, ratio to the standard block and stored bytes of each variant, for one shape."""
    torch.manual_seed(0)
    x, delta = torch.randn(2, options.batch, channels, pixels, pixels)
    contestants = {name: Contestant(block, x, delta, options.channels_last) for name, block in blocks(channels).items()}
    runs: dict[str, Callable[[], float]] = {name: partial(c.step, options.repeats) for name, c in contestants.items()}
    seconds = alternate(runs, options.rounds)
    return {
        name: {"seconds": seconds[name], "ratio": ratio(seconds[name], seconds[STANDARD]), "kept_bytes": contestants[name].kept()}
        for name in contestants
    }


def networks(batch: int) -> dict[str, dict[str, int]]:
    """Return the bytes that networks store for the backward of a batch of 224x224 images, computed on the meta device."""
    stored: dict[str, dict[str, int]] = {}
    for name, options in NETWORKS.items():
        for norm in ("batchnorm", "inplace_abn"):
            with torch.device("meta"):
                network = MODELS[name](classes=1000, norm=norm, activation="leaky_relu", **options).build(0)
                x = torch.empty(batch, 3, 224, 224)
            stored.setdefault(name, {})[norm] = kept_bytes(lambda network=network, x=x: network(x), network.parameters())
    return stored


def converted(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return, for small images, the seconds of a step of networks and of their conversions, bytes stored, and pairs converted."""
    rows: dict[str, dict[str, Any]] = {}
    for name in ("resnet50", "resnext101", "revnet50"):
        torch.manual_seed(0)
        standard = MODELS[name](norm="batchnorm", activation="leaky_relu", width=0.25).build(0)
        network, x = copy.deepcopy(standard), torch.randn(options.batch, 3, 64, 64)
        found = to_inplace_abn(network, report=lambda text: None)
        runs = {"standard": partial(step, standard, x), "converted": partial(step, network, x)}
        seconds = alternate(runs, options.rounds)
        stored = [kept_bytes(partial(net, x), net.parameters()) for net in (standard, network)]
        kept = dict(zip(runs, stored, strict=True))
        rows[name] = {"seconds": seconds, "ratio": ratio(seconds["converted"], seconds["standard"]), "kept_bytes": kept}
        rows[name]["pairs"] = f"{len(found.taken)} of {len(found.taken) + len(found.left)}"
    return rows


def step(network: nn.Module, x: Tensor) -> float:
    """Return the seconds of a forward and a backward pass."""
    start = time.perf_counter()
    network(x).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = benchmark_parser(__doc__, 15)
    parser.add_argument("--networks", action="store_true", help="measure converted networks only")
    parser.add_argument("--batch", type=int, default=16, help="images per microbatch")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--channels-last", action="store_true", help="store images with their channels last")
    parser.add_argument("--repeats", type=int, default=1, help="steps of each variant per round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    if options.networks:
        found = converted(options)
        print("| 64x64 pixels | pairs | over standard: median (min – max) | MiB stored | converted |\n|---|---|---|---|---|")
        for name, row in found.items():
            before, after = (row["kept_bytes"][key] / 2**20 for key in ("standard", "converted"))
            print(f"| {name} | {row['pairs']} | {_cell(row['ratio'])} | {before:.1f} | {after:.1f} |")
        save(options, {"converted": found})
        return
    layout = "channels last" if options.channels_last else "contiguous"
    print(f"3x3 convolutions in {GROUPS} groups, batch {options.batch}, {layout}, float32, {options.threads} threads\n")
    print("| | | ms: median (min – max) | over standard: median (min – max) | MiB stored |\n|---|---|---|---|---|", flush=True)
    figures = {}
    for shape, size in SHAPES.items():
        figures[shape] = measure(*size, options)
        for name, row in figures[shape].items():
            times, over = spread([1000 * s for s in row["seconds"]]), row["ratio"]
            print(f"| {shape} | {name} | {_cell(times)} | {_cell(over)} | {row['kept_bytes'] / 2**20:.2f} |", flush=True)
    kept = networks(batch=32)
    print("\n| batch 32 of 224x224, GiB stored | batch norm | InPlace-ABN | less |\n|---|---|---|---|")
    for name, row in kept.items():
        standard, inplace = row["batchnorm"], row["inplace_abn"]
        print(f"| {name} | {standard / 2**30:.2f} | {inplace / 2**30:.2f} | {1 - inplace / standard:.1%} |")
    save(options, {"shapes": SHAPES, "figures": figures, "networks": kept})


def _cell(row: dict[str, float]) -> str:
    return f"{row['median']:.3f} ({row['min']:.3f} – {row['max']:.3f})"


if __name__ == "__main__":
    main()
