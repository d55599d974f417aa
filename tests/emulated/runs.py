"""Training runs on the emulated device and on the CPU. The functions run in processes of :mod:`tests.emulated.processes`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

import petra.inplace_abn  # noqa: F401 - adds the norms of revnet18
from examples.vision_transformer import revvit
from petra import Model, Numerics, Pipeline, Runtime
from petra.models import MODELS
from petra.training import OPTIMIZERS
from tests.emulated import device as emulated
from tests.support.nets import RandomSource, RandomTokens, make_pipeline, mixed_net

BATCH = 4


def _images(size: int) -> RandomSource:
    return RandomSource(BATCH, size, dtype=torch.float32)


NETS: Mapping[str, tuple[Callable[[], Model], Callable[[], Any]]] = {
    "mixed": (lambda: mixed_net(dtype=torch.float32), lambda: _images(8)),
    "dropout": (lambda: mixed_net(dropout=0.1, dtype=torch.float32), lambda: _images(8)),
    "revnet18": (lambda: MODELS["revnet18"](5, width=0.125), lambda: _images(16)),
    "revnet50": (lambda: MODELS["revnet50"](5, width=0.125), lambda: _images(16)),
    "abn": (lambda: MODELS["revnet18"](5, width=0.125, norm="inplace_abn"), lambda: _images(16)),
    "resnet18": (lambda: MODELS["resnet18"](5, width=0.125), lambda: _images(16)),
    "revgpt": (lambda: MODELS["revgpt"](64, dim=16, depth=3, heads=2, dropout=0.1, size=12), lambda: RandomTokens(BATCH, 12, 64)),
    "qk_norm": (lambda: MODELS["revgpt"](64, dim=16, depth=3, heads=2, size=12, qk_norm=True), lambda: RandomTokens(BATCH, 12, 64)),
    "revvit": (lambda: revvit(5, dim=16, depth=3, heads=2, dropout=0.1, size=16), lambda: _images(16)),
}


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        method: Name of the method.
        net: Key of :data:`NETS`.
        k: Microbatches per update.
        microbatches: Length of the run.
        optimizer: Name of the optimizer.
        arguments: Further arguments of the pipeline.
        numerics: Arguments of :class:`petra.Numerics`.
        transport: Transport between processes.
        runtime: Further arguments of :class:`petra.Runtime`.
        refetch: Whether the first block fetches its input again.
    """

    method: str = "petra"
    net: str = "mixed"
    k: int = 2
    microbatches: int = 9
    optimizer: str = "sgd"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)
    transport: Any = "auto"
    runtime: Mapping[str, Any] = field(default_factory=dict)
    refetch: bool = False

    def pipeline(self, device: str | torch.device) -> Pipeline:
        """Build the pipeline of this run."""
        build, source = NETS[self.net]
        return make_pipeline(
            build(),
            source().spec,
            method=self.method,
            k=self.k,
            optimizer=OPTIMIZERS[self.optimizer],
            learning_rate=lambda t: 0.01,
            numerics=Numerics(**self.numerics),
            runtime=Runtime(device, self.transport if dist.is_initialized() else "auto", refetch=self.refetch, **self.runtime),
            **self.arguments,
        )

    def source(self) -> Any:
        """Return the data of this run."""
        return NETS[self.net][1]()


@dataclass(frozen=True)
class Outcome:
    """What a run ends with.

    Attributes:
        weights: Parameters and buffers of this process.
        losses: Losses of training, evaluation and a second training.
    """

    weights: dict[str, Tensor]
    losses: list[float]

    def difference(self, other: Self) -> float:
        """Return the largest difference of weights, relative to the largest value of each tensor."""
        assert self.weights.keys() == other.weights.keys()
        pairs = [(t.cpu().double(), other.weights[key].cpu().double()) for key, t in self.weights.items()]
        return float(torch.stack([(a - b).abs().max() / (b.abs().max() + 1e-12) for a, b in pairs]).max())  # of NaN, NaN


def joined(outcomes: list[Outcome]) -> Outcome:
    """Return the weights of all ranks of a replica."""
    weights = {key: value for outcome in outcomes for key, value in outcome.weights.items()}
    return Outcome(weights, outcomes[0].losses)


def same(first: Pipeline, second: Pipeline) -> bool:
    """Return whether two pipelines have the same weights, bit for bit."""
    weights = second.state_dict()
    return all(torch.equal(value.cpu(), weights[key].cpu()) for key, value in first.state_dict().items())


def train(case: Case, device: str | torch.device) -> Outcome:
    """Train, evaluate, and train some more."""
    pipeline = case.pipeline(device)
    source = case.source()
    results = [pipeline.train(source, case.microbatches), pipeline.evaluate(source, 2), pipeline.train(source, 3)]
    pipeline.stage_metrics()
    return Outcome(pipeline.state_dict(), [result.loss for result in results])


def train_rank(rank: int, case: Case) -> Outcome:
    """Train in one of several processes, each on its own emulated device."""
    return train(case, torch.device("cuda", rank))


def synchronizations(rank: int, case: Case) -> dict[str, int]:
    """Train on the emulated device; return the places where the host waited in training, and how often."""
    pipeline = case.pipeline(f"cuda:{rank}")
    with emulated.watch_syncs() as found:
        pipeline.train(case.source(), case.microbatches)
    return {f"{sync.kind} {sync.what} at {sync.place}": count for sync, count in found.items()}


def train_cpu_rank(rank: int, case: Case) -> Outcome:
    """Train in one of several processes on the CPU."""
    return train(case, "cpu")
