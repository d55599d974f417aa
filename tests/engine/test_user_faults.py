"""Losses, blocks and calls that a pipeline can't follow: results equal plain PyTorch's, or an error says what does not fit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import ConfigError, Keep, Method, Model, ModelError, Numerics, OuterStep, Pipeline, TensorSpec, UpdateRules, Weights
from petra.reversible import Coupling
from petra.training import Checkpoints
from tests.engine.test_any_block import FLAT, Halves, Vectors, chain, linear
from tests.support.nets import assert_equal, hook, make_pipeline, restored, sgd, train_plainly


def reversible(*functions: nn.Module, **settings: Any) -> Pipeline:
    """Return a pipeline of couplings of 3 channels per stream, with a block per stage."""
    blocks = {"stem": Halves(), **{f"c{i}": Coupling(f) for i, f in enumerate(functions)}, "merge": Halves(), "head": linear(6, 3)}
    return make_pipeline(Model.of("mine", blocks), FLAT, **({"optimizer": sgd, "method": "reversible"} | settings))


# The loss


def test_a_loss_of_other_tensors_than_the_output_is_refused() -> None:
    """A penalty on the weights, a parameter of its own, and a penalty that comes later in the same run."""
    held: list[Tensor] = []
    own, calls = nn.Parameter(torch.ones(3).double()), []

    def later(y: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(y, t) + (0 if len(calls) < 10 else held[0].square().sum())

    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda y, t: F.cross_entropy(y, t) + sum(p.square().sum() for p in held),
        lambda y, t: F.cross_entropy(y * own, t),
        later,
    ]
    for loss in losses:
        pipeline = reversible(linear(3, 3), loss=loss)
        held[:] = [p for _, block in pipeline.blocks() for p in block.parameters()]
        with pytest.raises(ModelError, match=r"^loss: expected a function of outputs and targets \(optim.weight_decay .*gradient"):
            pipeline.train(Vectors(), 40)


# Random numbers


class Late(nn.Module):
    """Draws a mask in some microbatches only: not in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return F.dropout(y, 0.5) if not x.is_meta and x[0, 0] > 0 else y


def reconstruction_error(pipeline: Pipeline, data: Any, microbatches: int, during: Callable[[], None] = lambda: None) -> float:
    """Return the largest difference of a block's input in a forward and a backward pass."""
    inputs, errors = {}, [0.0]
    pipeline.hooks.append(
        hook(
            block_forward_begin=lambda j, b, m, x: inputs.update({(b, m): [t.clone() for t in x]}),
            block_backward_end=lambda j, b, m, x, g: errors.extend(
                (a - t).abs().max().item() for a, t in zip(x, inputs[b, m], strict=True)
            ),
        )
    )
    pipeline.train(data, microbatches, on_microbatch=lambda report: during())
    return max(errors)


def test_masks_are_the_same_in_both_passes_whenever_a_block_begins_to_draw() -> None:
    data = Vectors()
    data.inputs = lambda m: Vectors.inputs(data, m) * (0 if m < 3 else 1)  # type: ignore[method-assign]
    late = reversible(Late(), Late(), k=2, learning_rate=lambda t: 0.0)
    assert reconstruction_error(late, data, 12) < 1e-12
    rising, done = nn.Dropout(0.0), []
    pipeline = reversible(nn.Sequential(linear(3, 3), rising), Late(), k=2, learning_rate=lambda t: 0.0)
    modules = [m for _, block in pipeline.blocks() for m in block.modules() if isinstance(m, nn.Dropout)]

    def raise_rate() -> None:
        done.append(1)
        for m in modules if len(done) > 3 else ():
            m.p = 0.5

    assert reconstruction_error(pipeline, Vectors(), 12, raise_rate) < 1e-12


class LateStem(nn.Module):
    """A block that stores its input, and draws in some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.late = Late()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        return self.late(a), b


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws_also_late_ones() -> None:
    """Blocks that store inputs or graphs: other random numbers of the process do not matter."""
    for method in ("dsp", "backprop", "1f1b"):
        found = []
        for seed in (1, 2):
            torch.manual_seed(0)
            model = Model.of("mine", {"stem": LateStem(), "merge": Halves(), "head": linear(6, 3)})
            pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=method, k=2)
            torch.manual_seed(seed)
            pipeline.train(Vectors(), 12)
            found.append(pipeline.state_dict())
        torch.testing.assert_close(*found, rtol=0, atol=0)


# Blocks whose backward pass does not fit the forward pass


class Own(Coupling):
    """A coupling with another forward pass."""

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Any:
        return x2, x1 + 2 * self.f(x2)


class Forgetful(Coupling):
    """A coupling that leaves a gradient out."""

    def inverse_vjp(self, *arguments: Any, **options: Any) -> Any:
        x, dx, gradients = super().inverse_vjp(*arguments, **options)
        return x, dx, {p: g for p, g in gradients.items() if p.dim() > 1}


class Rounded(Coupling):
    """A coupling whose output has lost bits that its inverse can't restore, with a gradient of 1."""

    def forward(self, *x: Tensor, seed: int | None = None) -> Any:
        y1, y2 = super().forward(*x, seed=seed)
        return y1, y2 + ((8 * y2).round() / 8 - y2).detach()


def hooked(**hooks: Callable[..., Any]) -> Coupling:
    block = Coupling(linear(3, 3))
    for name, function in hooks.items():
        getattr(block, f"register_{name}")(function)
    return block


class Statistics(nn.Module):
    """Reads running statistics after the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(3, 3), nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.norm(self.linear(x)) + self.norm.running_mean)
        return y


class Decays(nn.Module):
    """Changes its own weight: in place, or by ``.data``, which no version counter shows."""

    def __init__(self, silently: bool = False) -> None:
        super().__init__()
        self.linear, self.silently = linear(3, 3), silently

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.linear.weight.data if self.silently else self.linear.weight).mul_(0.9)
        y: Tensor = torch.tanh(self.linear(x))
        return y


class Counts(nn.Module):
    """Depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = linear(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        return self.linear(x) * self.calls


class Listed(nn.Module):
    """Reads a parameter of another block, or of its own past its attributes."""

    def __init__(self, foreign: Tensor | None = None) -> None:
        super().__init__()
        self.linear, self.scale = linear(), nn.Parameter(torch.tensor(2.0).double())
        self.plain = [self.scale if foreign is None else foreign]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.plain[0]


class Table(nn.Module):
    """Adds rows of a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = linear(3, 3), nn.Embedding(3, 3, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.table(x.detach().argmax(1))
        return y


def test_a_reversible_block_with_sparse_gradients_is_trained_as_plain_autograd_does() -> None:
    blocks = {"stem": Halves(), "c0": Coupling(Table()), "merge": Halves(), "head": linear(6, 3)}
    model, plain_sgd = Model.of("mine", blocks), lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
    pipeline, plain = make_pipeline(model, FLAT, optimizer=plain_sgd, method="reversible", k=2), model.build(0)
    pipeline.train(Vectors(), 6)
    train_plainly(plain, plain_sgd(plain), Vectors(), 6, 2)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-12)


RECONSTRUCT = r"^block c0: expected inverse_vjp to reconstruct the input of forward .*, got one that differs by"
GRADIENTS = r"^block c0: expected inverse_vjp to return the gradients of plain autograd .*, got another gradient of "


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda: hooked(forward_hook=lambda m, i, y: (y[0] * 1.5, y[1])), RECONSTRUCT),
        (lambda: hooked(forward_pre_hook=lambda m, x: (x[0] + 1, x[1])), RECONSTRUCT),
        (lambda: hooked(full_backward_hook=lambda m, gi, go: (gi[0] * 2, gi[1])), GRADIENTS + "input 1"),
        (lambda: Own(linear(3, 3)), RECONSTRUCT),
        (lambda: Rounded(linear(3, 3)), RECONSTRUCT),
        (lambda: Forgetful(linear(3, 3)), GRADIENTS + r"f\.bias"),
        (lambda: Coupling(Statistics()), RECONSTRUCT),
        (
            lambda: Coupling(Decays()),
            r"^block c0: expected parameters that a forward pass leaves .*, got a change of f\.linear\.weight",
        ),
        (lambda: Coupling(Decays(silently=True)), RECONSTRUCT),
    ],
    ids=lambda value: "",
)
def test_a_reversible_block_whose_passes_do_not_fit_is_refused(block: Callable[[], nn.Module], message: str) -> None:
    """By every method that reconstructs; one that stores graphs trains it as plain autograd does."""
    blocks = {"stem": Halves(), "c0": block(), "c1": Coupling(linear(3, 3)), "merge": Halves(), "head": linear(6, 3)}
    for method in ("reversible", "petra", "reconstruct_stashed"):
        with pytest.raises(ModelError, match=message):
            make_pipeline(Model.of("mine", blocks), FLAT, optimizer=sgd, method=method).train(Vectors(), 4)


@pytest.mark.parametrize("method", ["dsp", "pipedream_2bw", "delayed"])
def test_a_block_that_gives_another_output_again_is_refused(method: str) -> None:
    expected = r"^block b1: expected the same output for the same input again .*, got one that differs by"
    model = Model.of("mine", {"b0": linear(), "b1": Counts(), "b2": linear(6, 3)})
    pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=method, k=4)
    with pytest.raises(ModelError, match=expected):
        pipeline.train(Vectors(), 8)


@pytest.mark.parametrize("method", ["backprop", "dsp", "delayed"])
def test_a_block_that_reads_a_parameter_of_another_is_refused(method: str) -> None:
    other = linear()
    blocks = {"b0": other, "b1": linear(), "b2": linear(6, 3)}
    pipeline = make_pipeline(Model.of("mine", blocks), FLAT, optimizer=sgd, method=method)
    block = dict(pipeline.blocks())["b1"]
    scale = nn.Parameter(torch.tensor(2.0).double())
    block.register_forward_hook(lambda m, x, y: y * scale)
    with pytest.raises(ModelError, match=r"^block b1: expected a function of its input and its parameters.*another parameter \[\]"):
        pipeline.train(Vectors(), 4)


def test_a_parameter_that_is_read_past_its_attribute_is_trained_or_refused() -> None:
    """Plain autograd trains it. A version of the weights does not reach it."""
    for method in ("backprop", "1f1b", "delayed"):
        torch.manual_seed(0)
        model = Model.of("mine", {"b0": Listed(), "b1": linear(6, 3)})
        pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=method, k=2)
        plain = model.build(0)
        if method == "delayed":
            with pytest.raises(ModelError, match=r"^block b0: expected a function of its input and its parameters"):
                make_pipeline(model, FLAT, optimizer=sgd, method=Method("graphs", 2, Keep.GRAPH, Weights.STASHED)).train(
                    Vectors(), 4
                )
            continue
        pipeline.train(Vectors(), 8)
        train_plainly(plain, sgd(plain), Vectors(), 8, 2)
        torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


class Auxiliary(nn.Module):
    """Stores an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.auxiliary = [y.square().mean()]
        return y


def test_a_stored_auxiliary_loss_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = reversible(Auxiliary(), nn.utils.parametrizations.weight_norm(linear(3, 3)))
    pipeline.train(Vectors(), 4)
    pipeline.train(Vectors(), 4)
    expected = "block c0: forward stores f.auxiliary, from which no gradient comes back: only outputs carry gradients"
    assert caplog.messages == [expected]


def test_a_block_is_checked_again_after_a_change_of_its_hooks() -> None:
    pipeline = reversible(linear(3, 3), linear(3, 3))
    pipeline.train(Vectors(), 4)
    dict(pipeline.blocks())["c1"].register_forward_hook(lambda m, x, y: (y[0], 2 * y[1]))
    with pytest.raises(ModelError, match=r"^block c1: expected inverse_vjp to reconstruct"):
        pipeline.train(Vectors(), 4)


def test_blocks_before_the_first_trained_parameter_are_not_checked() -> None:
    """They have no backward pass, at which a check could end."""
    blocks = {"trunk": linear(6, 6).requires_grad_(False), "rest": nn.Tanh(), "head": linear(6, 3)}
    pipeline = make_pipeline(Model.of("mine", blocks), FLAT, optimizer=sgd, method="petra")
    pipeline.train(Vectors(), 4)
    functions = [runner.function for stage in pipeline.stages.values() for runner in stage.runners]
    assert [type(function).__name__ for function in functions] == ["BlockFunction"] * 3


def test_checks_cost_one_forward_and_backward_pass_of_a_reversible_block_once() -> None:
    """They change no result, no statistic and no random number, and need one input more than the ordinary backward pass."""
    calls: list[str] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("F")
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: calls.append("B"))  # type: ignore[no-untyped-call]
            return y

    block = nn.Sequential(Counted(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    pipeline = reversible(block, nn.Sequential(linear(3, 3), nn.Tanh()))
    calls.clear()
    torch.manual_seed(5)
    pipeline.train(Vectors(), 1)
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(5))
    assert (calls.count("F"), calls.count("B")) == (3, 2)
    assert pipeline.state_dict()["c0.f.1.num_batches_tracked"] == 1
    pipeline.train(Vectors(), 2)
    assert (calls.count("F"), calls.count("B")) == (7, 4)


def test_a_block_that_changes_before_its_first_microbatch_is_checked_once() -> None:
    pipeline, calls = reversible(linear(3, 3)), list[nn.Module]()
    pipeline.train(Vectors(), 0)
    dict(pipeline.blocks())["c0"].f.register_forward_hook(lambda f, x, y: calls.append(f))  # type: ignore[union-attr, operator]
    pipeline.train(Vectors(), 1)
    assert len(calls) == 3  # forward, reconstruction and check


# Between two calls of train


def twice(change: Callable[[Pipeline], object], first: int = 4, **settings: Any) -> dict[str, Tensor]:
    """Return the weights of a pipeline that somebody changes between two calls of ``train``."""
    torch.manual_seed(0)
    pipeline = reversible(nn.Sequential(linear(3, 3), nn.BatchNorm1d(3).double()), **({"k": 2} | settings))
    pipeline.train(Vectors(), first)
    change(pipeline)
    pipeline.train(Vectors(), 4)
    return {key: value.clone() for key, value in pipeline.state_dict().items() if "running" not in key and "num_" not in key}


def saliency(pipeline: Pipeline) -> None:
    y: Any = (Vectors().inputs(50).requires_grad_(),)
    for _, block in pipeline.blocks():
        y = block(*y)
        y = y if isinstance(y, tuple) else (y,)
    y[0].square().sum().backward()


def zero_grad(pipeline: Pipeline) -> None:
    for _, block in pipeline.blocks():
        block.zero_grad()


def test_gradients_of_the_callers_own_are_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    expected = twice(lambda pipeline: None)
    assert_equal(twice(zero_grad), expected)
    assert not caplog.messages
    assert_equal(twice(saliency), expected)
    assert caplog.messages[0].startswith("gradients have changed since the last call of train, which training sets aside: block ")
    assert_equal(twice(zero_grad, first=3), twice(lambda pipeline: None, first=3))
    with pytest.raises(ModelError, match=r"^block .*\.grad: expected that of a part of an update, as train left it"):
        twice(saliency, first=3)


@torch.no_grad()
def halve(pipeline: Pipeline) -> None:
    for p in (p for _, block in pipeline.blocks() for p in block.parameters()):
        p.data.mul_(0.5)


def test_parameters_that_a_caller_changes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    twice(halve)
    expected = "parameters have changed since the last call of train, training continues from them: block c0, f.0.bias and"
    assert caplog.messages[0].startswith(expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"rules": UpdateRules(weights="bf16"), "numerics": Numerics(autocast=torch.bfloat16)},
        {"rules": UpdateRules(average=0.999)},
        {"method": "pipedream_2bw"},
        {"extensions": [OuterStep(2)]},
    ],
    ids=["masters", "averages", "older_weights", "outer_weights"],
)
def test_parameters_that_a_caller_changes_count(settings: dict[str, Any], tmp_path: Path) -> None:
    """Also where updates start from other tensors, and right after these were loaded or before they are saved."""
    model, data, saved = Model.of("mine", {"a": nn.Linear(6, 6), "b": nn.Linear(6, 3)}), Vectors(), Checkpoints(tmp_path / "c")
    data.inputs = lambda m: Vectors.inputs(data, m).float()  # type: ignore[method-assign]

    def built() -> Pipeline:
        spec, rest = TensorSpec((4, 6), torch.float32), {"method": "petra", "k": 4, **settings}
        return make_pipeline(model, spec, optimizer=partial(sgd, lr=1e-4), **rest)

    def largest(pipeline: Pipeline) -> float:
        pipeline.train(data, 4)
        with pipeline.averaged():
            return max(p.abs().max().item() for _, block in pipeline.blocks() for p in block.parameters())

    pipeline = built()
    weights = {key: value.clone() for key, value in pipeline.state_dict().items()}
    saved.save(pipeline, {})
    for begin in (
        lambda: None,
        lambda: pipeline.train(data, 4),
        lambda: pipeline.load_state_dict(weights),
        lambda: restored(pipeline, tmp_path / "c"),
    ):
        begin()
        for p in (p for _, block in pipeline.blocks() for p in block.parameters()):
            p.data.zero_()
        assert largest(pipeline) < 0.01
        pipeline.load_state_dict(weights)
    for p in (p for _, block in pipeline.blocks() for p in block.parameters()):
        p.data.zero_()
    saved.save(pipeline, {})
    assert largest(restored(built(), tmp_path / "c")) < 0.01


def test_a_checkpoint_has_no_gradient_that_training_sets_aside(tmp_path: Path) -> None:
    """After ``zero_grad()`` or ``backward()`` of the caller, a resumed run continues as the uninterrupted one."""

    def add(block: nn.Module) -> None:
        for p in block.parameters():
            assert p.grad is not None
            p.grad.add_(1)

    pipeline, resumed = chain(linear(), linear(6, 3)), chain(linear(), linear(6, 3))
    pipeline.train(Vectors(), 4)
    for change in (nn.Module.zero_grad, add):
        for _, block in pipeline.blocks():
            change(block)
        Checkpoints(tmp_path / "c").save(pipeline, {})
        for _, block in resumed.blocks():
            change(block)
        restored(resumed, tmp_path / "c")
        for each in (pipeline, resumed):
            each.train(Vectors(), 4)
        assert_equal(resumed.state_dict(), pipeline.state_dict())


def test_averages_in_the_place_of_weights_are_not_saved(tmp_path: Path) -> None:
    pipeline = chain(linear(), linear(6, 3), rules=UpdateRules(average=0.9))
    pipeline.train(Vectors(), 4)
    with pipeline.averaged(), pytest.raises(ConfigError, match=r"^averaged\(\): expected to be left before"):
        Checkpoints(tmp_path / "c").save(pipeline, {})


def test_modes_that_a_caller_changes_are_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    def evaluation(pipeline: Pipeline) -> None:
        for _, block in pipeline.blocks():
            block.eval()

    with pytest.raises(ModelError, match=r"^block .*: expected the mode in which train left it .*, got evaluation mode$"):
        twice(evaluation)
    twice(lambda pipeline: dict(pipeline.blocks())["c0"].get_submodule("f.1").eval())
    assert caplog.messages == ["modes have changed since the last call of train, training continues in them: block c0, f.1, mode"]


def test_statistics_that_a_forward_pass_of_the_caller_moves_are_named(caplog: pytest.LogCaptureFixture) -> None:
    twice(lambda pipeline: dict(pipeline.blocks())["c0"](*torch.randn(2, 4, 3).double()))
    assert caplog.messages[0].startswith(
        "buffers have changed since the last call of train, training continues from them: block c0, "
    )


def test_what_petra_changes_between_calls_is_not_noticed(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def own(pipeline: Pipeline) -> None:
        pipeline.evaluate(Vectors(), 2)
        Checkpoints(tmp_path / "checkpoints").save(pipeline, {})
        restored(pipeline, tmp_path / "checkpoints")
        pipeline.load_state_dict({key: value.clone() for key, value in pipeline.state_dict().items()})

    twice(own, rules=UpdateRules(average=0.9))
    assert not caplog.messages


def test_numbers_that_are_nan_and_stay_it_are_not_noticed(caplog: pytest.LogCaptureFixture) -> None:
    def module() -> nn.Module:
        made = linear(6, 3)
        made.register_buffer("unknown", torch.full((3,), torch.nan))
        return made

    pipeline = chain(linear(), module())
    for _ in range(2):
        pipeline.train(Vectors(), 4)
    assert not caplog.messages


def test_an_error_names_the_block_or_the_cause() -> None:
    def scheduled(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(module)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    with pytest.raises(ModelError, match=r"^block c0: .*f: expected a function with outputs of the shape of its stream"):
        reversible(linear(3, 2))
    with pytest.raises(ConfigError, match=r"^optimizer: expected one without a scheduler \(learning_rate takes"):
        reversible(linear(3, 3), optimizer=scheduled)
