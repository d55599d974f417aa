"""Try calls of the library and code of users that could give a wrong number without an error.

``python -m stress.silent_library``

Each try compares petra with plain torch: equal numbers are "right", a refusal in one line is "refused", and other numbers are
"SILENT". The exit status is 1 if one is silent, or ends in an exception that is not petra's. Tries are named ``<area>_<what>``.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from petra import BlockSpec, Losses, Model, Pipeline, Recipe, TensorSpec, UpdateRules
from petra.data import EvalSource, TrainSource, from_dataset
from petra.engine.metrics import correct_predictions
from petra.errors import PetraError
from petra.training import Checkpoints, Trainer, newest, restore
from stress.frame import run_tries

B, D, C = 6, 8, 5


class Data:
    """Random microbatches of six rows, which depend on their number only."""

    spec = TensorSpec((B, D), torch.float64)

    def inputs(self, m: int) -> Any:
        return torch.randn(B, D, generator=torch.Generator().manual_seed(m), dtype=torch.float64)

    def targets(self, m: int) -> Any:
        return torch.randint(C, (B,), generator=torch.Generator().manual_seed(m + 999))


class Other(Data):
    """Microbatches whose inputs and targets go through functions."""

    def __init__(self, inputs: Callable[[Any], Any] = lambda x: x, targets: Callable[[Any], Any] = lambda t: t) -> None:
        self._inputs, self._targets = inputs, targets

    def inputs(self, m: int) -> Any:
        return self._inputs(super().inputs(m))

    def targets(self, m: int) -> Any:
        return self._targets(super().targets(m))


def net() -> Model:
    builds = {"a": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()), "b": lambda: nn.Linear(D, C)}
    return Model("net", tuple(BlockSpec(name, lambda build=build: build().double()) for name, build in builds.items()))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def petra(count: int = 6, data: Any = None, k: int = 2, method: str = "backprop", **recipe: Any) -> Pipeline:
    """Return a pipeline that has trained."""
    pipeline = Pipeline(net(), Data.spec, Recipe(**{"optimizer": sgd, **recipe}), method=method, k=k)
    pipeline.train(data or Data(), count)
    return pipeline


def plain(
    count: int = 6,
    data: Any = None,
    k: int = 2,
    loss: Callable[..., Tensor] = F.cross_entropy,
    rate: Callable[[int], float] | None = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    before: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Tensor]:
    """Return the weights after plain training."""
    model, data = net().build(0), data or Data()
    made = optimizer(model)
    for m in range(count):
        (loss(model(data.inputs(m)), data.targets(m)) / k).backward()
        if (m + 1) % k == 0:
            for group in made.param_groups if rate else ():
                group["lr"] = rate(m + 1) if rate else 0
            before(model)
            made.step()
            made.zero_grad()
    return dict(model.state_dict())


def same(found: Pipeline, expected: dict[str, Tensor], tolerance: float = 1e-12) -> bool:
    return all((found.state_dict()[key] - value).abs().max() <= tolerance for key, value in expected.items())


def samples(count: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, D, generator=generator, dtype=torch.float64), torch.randint(C, (count,), generator=generator)


def evaluated(targets: Tensor, loss: Any, metric: Any, x: Tensor) -> Any:
    source = EvalSource(from_dataset(TensorDataset(x, targets)), batch_size=B)
    recipe = Recipe(sgd, loss=Losses(F.cross_entropy, loss), metrics={"own": metric})
    return Pipeline(net(), Data.spec, recipe).evaluate(source, source.batches)


WEIGHT = torch.tensor([0.1, 1, 3, 0.5, 2], dtype=torch.float64)


def losses_class_weights() -> bool:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    return same(petra(loss=loss), plain(loss=loss))


def losses_returns_float32_of_float64_output() -> bool:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), targets)

    return same(petra(loss=loss), plain(loss=loss), 1e-7)


def losses_soft_targets() -> bool:
    data = Other(targets=lambda t: F.one_hot(t, C).double() * 0.8 + 0.04)
    return same(petra(data=data, metrics={}), plain(data=data))


def losses_of_python_branch() -> bool:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(output, targets)
        return value if value > 1.5 else value**2

    return same(petra(loss=loss), plain(loss=loss))


def losses_regression_of_one_column() -> bool:
    data = Other(targets=lambda t: t.double() / 7)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.smooth_l1_loss(output[:, 2], targets)

    return same(petra(data=data, loss=loss, metrics={}), plain(data=data, loss=loss))


def losses_that_detach_a_part() -> bool:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.kl_div(output.log_softmax(1), (output.detach() * 2).softmax(1), reduction="batchmean") + F.cross_entropy(
            output, targets
        )

    return same(petra(loss=loss), plain(loss=loss))


def losses_with_gradient_penalty() -> bool:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(output, targets)
        (inner,) = torch.autograd.grad(value, output, create_graph=True)
        return value + inner.square().sum()

    return same(petra(loss=loss), plain(loss=loss))


def losses_that_write_targets() -> bool:
    loss = lambda o, t: F.cross_entropy(o, t.clamp_(max=2))  # noqa: E731
    y = [Data().targets(m) for m in range(6)]
    source = SimpleNamespace(inputs=Data().inputs, targets=lambda m: y[m])
    return same(petra(data=source, loss=loss), plain(loss=loss)) and all(torch.equal(t, Data().targets(m)) for m, t in enumerate(y))


def losses_with_a_label_smoothing_only_in_training() -> bool:
    smooth = lambda o, t: F.cross_entropy(o, t, label_smoothing=0.3)  # noqa: E731
    pipeline = petra(0, loss=Losses(smooth, F.cross_entropy))
    x, y = Data().inputs(0), Data().targets(0)
    expected = [loss(net().build(0)(x), y).item() for loss in (smooth, F.cross_entropy)]
    found = [pipeline.evaluate(Data(), 1).loss, pipeline.train(Data(), 1).loss]
    return all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(found[::-1], expected, strict=True))


def metrics_of_numpy() -> bool:
    metric = lambda o, t: torch.tensor(float(np.sum(o.numpy().argmax(1) == t.numpy())))  # noqa: E731
    x, y = samples()
    return evaluated(y, F.cross_entropy, metric, x).metrics["own"] == float((net().build(0)(x).argmax(1) == y).double().mean())


def metrics_of_python_numbers() -> bool:
    x, y = samples()
    return evaluated(y, F.cross_entropy, lambda o, t: float((o.argmax(1) == t).sum()), x).metrics["own"] >= 0


def metrics_of_absolute_errors_with_padding() -> bool:
    x, y = samples()
    found = evaluated(y, lambda o, t: F.l1_loss(o[:, 0], t.double()), lambda o, t: (o[:, 0] - t).abs().sum(), x)
    expected = F.l1_loss(net().build(0)(x)[:, 0], y.double()).item()
    return math.isclose(found.loss, expected, rel_tol=1e-12) and math.isclose(found.metrics["own"], expected, rel_tol=1e-12)


def metrics_that_sort_the_output_in_place() -> bool:
    return petra(metrics={"own": lambda o, t: o.sigmoid_().sum()}) is None


def metrics_that_are_a_vector() -> bool:
    return petra(metrics={"own": lambda o, t: (o.argmax(1) == t).double()}) is None


def metrics_changed_after_the_recipe() -> bool:
    metrics: dict[str, Any] = {"accuracy": correct_predictions}
    pipeline = petra(metrics=metrics)
    metrics["other"] = metrics.pop("accuracy")
    return [*pipeline.train(Data(), 2).metrics] == ["accuracy"]


def sources_of_numpy() -> bool:
    return petra(data=Other(inputs=lambda x: x.numpy())) is None


def sources_of_targets_as_lists() -> bool:
    return petra(data=Other(targets=lambda t: t.tolist())) is None


def sources_that_reuse_a_buffer() -> bool:
    buffer = torch.empty(B, D, dtype=torch.float64)
    reused = Other(inputs=lambda x: buffer.copy_(x))
    return same(petra(data=reused, method="1f1b", k=3), plain(k=3))


def sources_of_int32_targets() -> bool:
    data = Other(targets=lambda t: t.int())
    return same(petra(data=data), plain())


def sources_of_strided_inputs() -> bool:
    data = Other(inputs=lambda x: x.t().contiguous().t())
    return same(petra(data=data), plain())


def sources_of_inputs_that_require_gradients() -> bool:
    return same(petra(data=Other(inputs=lambda x: x.requires_grad_())), plain())


def sources_with_fewer_rows_at_the_end() -> bool:
    return petra(data=Other(inputs=lambda x: x[:4], targets=lambda t: t[:4])) is None


def sources_with_fewer_targets_than_rows() -> bool:
    return petra(data=Other(targets=lambda t: t[:4])) is None


def schedules_of_fractions() -> bool:
    return same(petra(learning_rate=lambda t: Fraction(1, t)), plain(rate=lambda t: 1 / t))


def schedules_of_numpy_scalars() -> bool:
    return same(petra(learning_rate=lambda t: np.float64(0.1) / t), plain(rate=lambda t: 0.1 / t))


def schedules_that_count_their_calls_in_one_stage() -> bool:
    rate = torch.tensor(1.0, dtype=torch.float64)
    recipe = Recipe(sgd, lambda t: rate.mul_(0.5))
    pipeline = Pipeline(net(), Data.spec, recipe, method="backprop", k=2, stages=1)
    pipeline.train(Data(), 6)
    return same(pipeline, plain(rate=lambda t: 0.5 ** (t // 2))) and float(rate) == 0.125


def schedules_that_are_negative() -> bool:
    return petra(learning_rate=lambda t: -0.1) is None


def schedules_of_complex_numbers() -> bool:
    return petra(learning_rate=lambda t: 0.1 + 0j) is None


def optimizers_of_tensor_betas() -> bool:
    make = lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)  # noqa: E731
    return same(petra(optimizer=make), plain(optimizer=make), 1e-9)


def optimizers_that_maximize() -> bool:
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True)  # noqa: E731
    return same(petra(optimizer=make), plain(optimizer=make))


def optimizers_with_a_step_hook() -> bool:
    def make(module: nn.Module) -> Any:
        made = sgd(module)
        made.register_step_pre_hook(lambda o, a, k: [p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]] and None)
        return made

    return same(petra(optimizer=make), plain(optimizer=make))


def rules_clip_of_one_stage() -> bool:
    pipeline = Pipeline(net(), Data.spec, Recipe(sgd, rules=UpdateRules(clip=0.1)), method="backprop", k=2, stages=1)
    pipeline.train(Data(), 6)
    clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    return same(pipeline, plain(before=clip))


def resume_with_adam() -> bool:
    make = lambda m: torch.optim.Adam(m.parameters(), lr=0.01)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        Checkpoints(Path(folder)).save(petra(3, optimizer=make), {})
        resumed, path = petra(0, optimizer=make), newest(Path(folder))
        assert path is not None
        restore(resumed, path)
    resumed.train(Data(), 3)
    return same(resumed, plain(optimizer=make), 1e-10)


def resume_with_another_k() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Checkpoints(Path(folder)).save(petra(4), {})
        path = newest(Path(folder))
        assert path is not None
        return restore(petra(0, k=3), path) is None


def evaluation_of_one_sample_per_batch() -> bool:
    x, y = samples(5)
    source = EvalSource(from_dataset(TensorDataset(x, y)), batch_size=1)
    found = Pipeline(net(), TensorSpec((1, D), torch.float64), Recipe(sgd)).evaluate(source, 5)
    return math.isclose(found.loss, F.cross_entropy(net().build(0)(x), y).item(), rel_tol=1e-12)


def evaluation_twice_gives_the_same() -> bool:
    pipeline = petra()
    return pipeline.evaluate(Data(), 3) == pipeline.evaluate(Data(), 3)


def evaluation_of_float_targets_with_padding() -> bool:
    x, y = samples()
    found = evaluated(y.double(), lambda o, t: F.mse_loss(o[:, 1], t), lambda o, t: o.sum() * 0, x)
    return math.isclose(found.loss, F.mse_loss(net().build(0)(x)[:, 1], y.double()).item(), rel_tol=1e-12)


def trainer_without_an_update() -> bool:
    x, y = samples(12)
    split = from_dataset(TensorDataset(x, y))
    pipeline = Pipeline(net(), Data.spec, Recipe(sgd, lambda t: 0.1), k=5)
    return Trainer(pipeline, TrainSource(split, B, 0), EvalSource(split, B)).fit(2) is None


def trainer_history_is_the_callers() -> bool:
    x, y = samples(12)
    split = from_dataset(TensorDataset(x, y))
    trainer = Trainer(Pipeline(net(), Data.spec, Recipe(sgd, lambda t: 0.1)), TrainSource(split, B, 0), EvalSource(split, B))
    trainer.fit(1).clear()
    return len(trainer.fit(2)) == 2


def tries_of(functions: Mapping[str, Any], areas: Sequence[str]) -> dict[str, tuple[str, Callable[[], tuple[str, str]]]]:
    """Return the tries of a program: its functions whose names begin with an area."""

    def made(function: Callable[[], bool]) -> tuple[str, str]:
        try:
            return ("right" if function() else "SILENT"), ""
        except PetraError as error:
            return ("refused" if "\n" not in str(error) else "SEVERAL LINES"), str(error)

    names = [(name, name.partition("_")[0]) for name, found in functions.items() if callable(found)]
    return {name: (area, partial(made, functions[name])) for name, area in names if area in areas and area != name}


AREAS = ("losses", "metrics", "sources", "schedules", "optimizers", "rules", "resume", "evaluation", "trainer")

if __name__ == "__main__":
    run_tries(__doc__, tries_of(globals(), AREAS))
