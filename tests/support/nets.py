"""Small networks and data for tests, with every kind of block."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Model, Pipeline, Recipe, TensorSpec
from petra.engine.endpoints import DataSource
from petra.hooks import Hook
from petra.models.layers import StridedPointwise
from petra.reversible import Coupling, TwoFunctionCoupling, derive_seed
from petra.training import newest, restore


def branch(channels: int, dropout: float = 0.0) -> nn.Module:
    """Return F: convolution, batch norm, tanh, and dropout if any."""
    layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.Tanh()]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))


class Stem(nn.Module):
    """Convolution whose channels are split into two streams."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layers(x).chunk(2, dim=1)


class Down(nn.Module):
    """Downsampling block: (x1, x2) -> (h, shortcut(x1) + f(h))."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.BatchNorm2d(2 * channels))
        self.second = branch(2 * channels, dropout)
        self.shortcut = StridedPointwise(channels, 2 * channels, 1, stride=2)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x2))
        return h, self.shortcut(x1) + self.second(h)


class Head(nn.Module):
    """Linear classifier of both streams, averaged over the image."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * channels, classes)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.linear(torch.cat([x1, x2], 1).mean((2, 3)))


def mixed_net(channels: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Model:
    """Return a model of six blocks: stem, PETRA block, downsampling, two-function coupling, PETRA block, head."""
    narrow, wide = partial(branch, channels, dropout), partial(branch, 2 * channels, dropout)
    builds = {
        "stem": partial(Stem, channels),
        "block1": partial(_made, Coupling, narrow),
        "down": partial(Down, channels, dropout),
        "block2": partial(_made, TwoFunctionCoupling, wide, wide),
        "block3": partial(_made, Coupling, wide),
        "head": partial(Head, 2 * channels, 5),
    }
    return Model("mixed", tuple(BlockSpec(name, partial(_converted, build, dtype)) for name, build in builds.items()))


def double(model: Model) -> Model:
    """Return a model in float64."""
    return Model(model.name, tuple(BlockSpec(b.name, partial(_converted, b.build, torch.float64)) for b in model.blocks))


def _made(kind: Callable[..., nn.Module], *functions: Callable[[], nn.Module]) -> nn.Module:
    return kind(*(function() for function in functions))


def _converted(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return build().to(dtype)


class RandomSource:
    """Random microbatches, which depend on their index only. The inputs of some go through a function of ``changes``."""

    def __init__(
        self,
        batch: int = 4,
        size: int = 8,
        classes: int = 5,
        dtype: torch.dtype = torch.float64,
        changes: Mapping[int, Callable[[Tensor], Any]] | None = None,
    ) -> None:
        self.batch, self.size, self.classes, self.dtype, self.changes = batch, size, classes, dtype, changes or {}
        self.spec = TensorSpec((batch, 3, size, size), dtype)

    def inputs(self, m: int) -> Tensor:
        x = torch.randn(self.spec.shape, generator=self._generator(m, 0), dtype=self.dtype)
        return self.changes[m](x) if m in self.changes else x

    def refetch(self, m: int) -> Tensor:
        return self.inputs(m)

    def targets(self, m: int) -> Tensor:
        return torch.randint(self.classes, (self.batch,), generator=self._generator(m, 1))

    @staticmethod
    def _generator(m: int, kind: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(99, kind, m))


class RandomTokens:
    """Random rows of tokens, which depend on the index of the microbatch only. Each target is the next token."""

    def __init__(self, batch: int, size: int, classes: int) -> None:
        self.classes, self.spec = classes, TensorSpec((batch, size), torch.int64)

    def inputs(self, m: int) -> Tensor:
        return self._rows(m)[:, :-1]

    def targets(self, m: int) -> Tensor:
        return self._rows(m)[:, 1:].flatten()

    def _rows(self, m: int) -> Tensor:
        batch, size = self.spec.shape
        return torch.randint(self.classes, (batch, size + 1), generator=torch.Generator().manual_seed(derive_seed(5, m)))


def sgd(module: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """Return SGD with all that it may have: Nesterov momentum and weight decay."""
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-3)


def train_plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: DataSource,
    microbatches: int,
    k: int = 1,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> list[float]:
    """Train with ordinary autograd: one update for each ``k`` microbatches. Return the loss of each microbatch."""
    losses = []
    optimizer.zero_grad()
    for m in range(microbatches):
        value = loss(model(data.inputs(m)), data.targets(m))
        (value / k).backward()
        losses.append(value.item())
        if (m + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Recorder(torch.optim.SGD):
    """Changes nothing and remembers the gradients of its last step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=1.0)
        self.found: dict[Tensor, Tensor] = {}

    def step(self) -> None:  # type: ignore[override]
        self.found = {p: p.grad.clone() for p in self.param_groups[0]["params"] if p.grad is not None}


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the gradients of the last update of a pipeline with :class:`Recorder`, by the names of the parameters."""
    optimizers = [worker.update.optimizer for worker in pipeline.workers.values()]
    found = {p: g for optimizer in optimizers if isinstance(optimizer, Recorder) for p, g in optimizer.found.items()}
    named = [(f"{name}.{key}", p) for name, block in pipeline.blocks() for key, p in block.named_parameters()]
    return {key: found[p] for key, p in named if p in found}


def assert_plain_gradients(
    model: Model, data: Any, k: int, *, rtol: float = 1e-9, atol: float = 1e-12, **settings: Any
) -> Pipeline:
    """Assert that the first update of a pipeline has the gradients of plain autograd, their mean over ``k`` microbatches."""
    pipeline, plain = make_pipeline(model, data.spec, k=k, optimizer=Recorder, seed=3, **settings), model.build(3)
    pipeline.train(data, k)
    for m in range(k):
        (F.cross_entropy(plain(data.inputs(m)), data.targets(m)) / k).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(gradients(pipeline), expected, rtol=rtol, atol=atol)
    return pipeline


def mixed(dropout: float = 0.0, **settings: Any) -> Pipeline:
    """Return a pipeline that trains :func:`mixed_net` on :class:`RandomSource`."""
    return make_pipeline(mixed_net(dropout=dropout), RandomSource().spec, **{"optimizer": sgd, **settings})


def hook(**events: Callable[..., None]) -> Hook:
    """Return a hook that calls a function at each of some events."""
    made: Hook = type("Functions", (Hook,), {name: staticmethod(function) for name, function in events.items()})()
    return made


def weights(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers of a pipeline."""
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


def restored(pipeline: Pipeline, folder: Path) -> Pipeline:
    """Return a pipeline with the state of the newest checkpoint in a folder."""
    path = newest(folder)
    assert path is not None
    restore(pipeline, path)
    return pipeline


def assert_equal(found: Any, expected: Any) -> None:
    """Assert that tensors, or dictionaries or lists of them, are equal bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def make_pipeline(*arguments: Any, **settings: Any) -> Pipeline:
    """Return a pipeline, given the fields of its recipe, values of remedies, and its other arguments by name."""
    if "remedy" in settings:
        settings["extensions"] = settings.pop("remedy").make()
    recipe = {field.name: settings.pop(field.name) for field in fields(Recipe) if field.name in settings}
    return Pipeline(*arguments, recipe=Recipe(**recipe), **settings)
