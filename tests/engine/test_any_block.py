"""Blocks, optimizers and data of a user's own: results equal plain PyTorch's, or an error says what does not fit."""

import copy
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from petra import BlockSpec, ConfigError, Keep, Method, Model, ModelError, Numerics, Pipeline, TensorSpec, Weights
from petra.reversible import Coupling, ReversibleSequence, TwoFunctionCoupling
from petra.training.optim import OPTIMIZERS
from tests.support.nets import assert_equal, make_pipeline, sgd, train_plainly
from tests.support.processes import run_processes
from tests.support.refusals import refuses
from tests.support.remedies import Remedy

FLAT = TensorSpec((4, 6), torch.float64)


class Vectors:
    """Random vectors and classes by index."""

    def inputs(self, m: int) -> Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(m), dtype=torch.float64)

    def targets(self, m: int) -> Tensor:
        return torch.randint(3, (4,), generator=torch.Generator().manual_seed(1000 + m))


def linear(inputs: int = 6, outputs: int = 6) -> nn.Linear:
    return nn.Linear(inputs, outputs).double()


def chain(*blocks: nn.Module, **settings: Any) -> Pipeline:
    """Return a pipeline of one block per stage."""
    model = Model.of("mine", {f"b{i}": block for i, block in enumerate(blocks)})
    return make_pipeline(model, FLAT, **({"optimizer": sgd, "method": "backprop"} | settings))


# Activation checkpointing


class Checkpointed(nn.Module):
    """Two layers, with activation checkpointing or without."""

    def __init__(self, saves_memory: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())
        self.saves_memory = saves_memory

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.saves_memory else self.layers(x)


def trained_weights(saves_memory: bool, method: Method, k: int, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pipeline = chain(*(Checkpointed(saves_memory) for _ in range(3)), linear(6, 3), method=method, k=k, **settings)
    pipeline.train(Vectors(), 15)
    return pipeline.state_dict()


@pytest.mark.parametrize(
    ("method", "k"),
    [
        (Method("stashed", 2, Keep.GRAPH, Weights.STASHED), 1),
        (Method("double", 2, Keep.GRAPH, Weights.DOUBLE), 6),
        (Method("input", 2, Keep.INPUT), 1),
        (Method("flushed", 1, Keep.GRAPH, flush=True), 2),  # no update comes between forward and backward
        (Method("updated", 2, Keep.GRAPH), 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_activation_checkpointing_changes_nothing_or_is_refused_where_updates_write_through_graphs(method: Method, k: int) -> None:
    if method.name == "updated":
        with pytest.raises(ModelError, match=r"^Checkpointed: activation checkpointing .* method\.keep=input"):
            trained_weights(True, method, k)
        with pytest.raises(ModelError, match=r"^Checkpointed: activation checkpointing .* method\.keep=input"):
            trained_weights(True, method, k, numerics=Numerics(autocast=torch.bfloat16))
    else:
        torch.testing.assert_close(trained_weights(True, method, k), trained_weights(False, method, k), rtol=1e-12, atol=1e-14)


# Running statistics


class RunningMean(nn.Module):
    """Subtracts a running mean that it computes itself."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = linear(3, 3), replaces
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                moved = self.mean.lerp(x.mean(0), 0.1)
                self.mean = moved if self.replaces else self.mean.copy_(moved)
        return self.linear(x - self.mean)


class Halves(nn.Module):
    """Two streams from one, and one from two."""

    def forward(self, *x: Tensor) -> Any:
        return x[0].chunk(2, 1) if len(x) == 1 else torch.cat(x, 1)


STATEFUL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own statistics": (lambda: RunningMean(False), "mean"),
    "own statistics that are replaced": (lambda: RunningMean(True), "mean"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(linear(3, 3)), r"parametrizations\.weight\.0\._[uv]"),
    "spectral norm of a hook": (lambda: nn.utils.spectral_norm(linear(3, 3)), r"weight_[uv]"),
}


@pytest.mark.parametrize(("name", "method"), [*zip(STATEFUL, ["reversible", "petra", "delayed", "petra"], strict=True)])
def test_a_buffer_that_would_move_twice_per_microbatch_is_refused(name: str, method: str) -> None:
    build, buffer = STATEFUL[name]
    blocks = (Halves(), Coupling(build()), Coupling(build()), Halves(), linear(6, 3))
    chain(*blocks, method="backprop").train(Vectors(), 2)  # evaluates blocks once
    expected = rf"block b[12]: expected buffers that a forward pass leaves as they are, .*, got a change of f\.{buffer}"
    with pytest.raises(ModelError, match=expected):
        chain(*blocks, method=method).train(Vectors(), 2)


def test_a_layer_in_evaluation_mode_stays_frozen() -> None:
    norm = nn.BatchNorm1d(6).double().eval()
    pipeline = chain(linear(), norm, linear(6, 3))
    pipeline.evaluate(Vectors(), 1)
    pipeline.train(Vectors(), 3)
    state = pipeline.state_dict()
    assert torch.equal(state["b1.running_mean"], torch.zeros(6, dtype=torch.float64))
    assert not torch.equal(state["b1.weight"], torch.ones(6, dtype=torch.float64))


# Optimizers


def groups(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(module.parameters())], lr=0.1)


class Unused(nn.Module):
    """A layer with a parameter that no gradient reaches, and one that odd microbatches use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.unused = nn.Parameter(torch.ones(5, 5, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y @ self.sometimes if x.is_meta or x[0, 0] > 0 else y


OPTIMIZER_SETTINGS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.5),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.01, weight_decay=0.5, momentum=0.9),
]


@pytest.mark.parametrize(("optimizer", "k"), [*zip(OPTIMIZER_SETTINGS, (1, 2), strict=True)])
def test_parameters_without_gradient_are_left_as_plain_pytorch_leaves_them(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], k: int
) -> None:
    torch.manual_seed(0)
    pipeline = chain(Unused(), Unused(), linear(6, 3), optimizer=optimizer, k=k)
    plain, data = pipeline.plan.model.build(0), Vectors()
    pipeline.train(data, 8)
    train_plainly(plain, optimizer(plain), data, 8, k)
    torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    assert torch.equal(pipeline.state_dict()["b0.unused"], torch.ones(5, 5, dtype=torch.float64))


def _replica(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    pipeline = chain(Unused(), linear(6, 3), dp=2, stages=1, optimizer=OPTIMIZER_SETTINGS[0])
    pipeline.train(Vectors(), 3)
    return pipeline.state_dict()


@pytest.mark.processes
def test_replicas_agree_on_parameters_without_gradient(tmp_path: Any) -> None:
    """The first samples of the replicas' shares decide whether they use ``sometimes``."""
    first, second = run_processes(2, _replica, tmp_path)
    assert_equal(first, second)
    assert torch.equal(first["b0.unused"], torch.ones(5, 5).double())
    assert not torch.equal(first["b0.sometimes"], torch.ones(6, 6).double())


def test_freezing_after_construction_is_refused() -> None:
    pipeline = chain(linear(), linear(6, 3))
    pipeline.stages[0].module[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"^parameter 0\.weight of stage 1: expected requires_grad=True, .* got false$"):
        pipeline.train(Vectors(), 1)


# Data, losses, metrics


def test_a_microbatch_without_targets_counts_nothing() -> None:
    torch.manual_seed(0)
    pipeline = chain(linear(6, 3), k=2)
    plain, data = pipeline.plan.model.build(0), Vectors()
    data.targets = lambda m: torch.full((4,), -100) if m % 2 else Vectors.targets(data, m)  # type: ignore[method-assign]
    evaluated = pipeline.evaluate(data, 4)
    assert evaluated.targets == 8
    losses = [F.cross_entropy(plain(data.inputs(m)), data.targets(m)).item() for m in (0, 2)]
    assert evaluated.loss == pytest.approx(sum(losses) / 2)
    found = pipeline.train(data, 2)
    assert found.targets == 4
    optimizer = sgd(plain)
    (F.cross_entropy(plain(data.inputs(0)), data.targets(0)) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(pipeline.state_dict()["b0.weight"], plain.state_dict()["b0.weight"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("keep", [Keep.INPUT, Keep.GRAPH])
def test_a_source_may_refill_its_buffer(keep: Keep) -> None:
    data, refilled, memory, results = Vectors(), Vectors(), torch.empty(4, 6, dtype=torch.float64), []
    refilled.inputs = lambda m: memory.copy_(data.inputs(m))  # type: ignore[method-assign]
    for source in (data, refilled):
        torch.manual_seed(0)
        pipeline = chain(linear(), linear(), linear(6, 3), method=Method("mine", 2, keep))
        pipeline.train(source, 6)
        results.append(pipeline.state_dict())
    assert_equal(*results)


def test_soft_targets_need_metrics_of_their_own() -> None:
    data = Vectors()
    data.targets = lambda m: F.one_hot(Vectors.targets(data, m), 3).double()  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"metric accuracy: expected integer targets .*, got float64\[4, 3\]"):
        chain(linear(6, 3)).train(data, 1)
    assert chain(linear(6, 3), metrics={}).train(data, 2).targets == 8


IN_PLACE = (linear(), nn.Sequential(nn.ReLU(inplace=True), linear()), linear(6, 3))


class Twice(nn.Module):
    """Returns its input twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


test_what_does_not_fit_is_one_clear_error = refuses(
    lambda call: call(),
    # the module is left alone: the next cases use it
    (lambda: make_pipeline(Model("mine", (BlockSpec("b", lambda: IN_PLACE[2]),)), FLAT, optimizer=sgd), r"new .*Model\.of"),
    *(
        (
            lambda method=method, stages=stages: chain(*IN_PLACE, method=method, stages=stages).train(Vectors(), 4),
            "^block b1 modifies its input in place",
        )
        for method, stages in (("backprop", 1), ("reversible", None), ("delayed", None), ("1f1b", 1))
    ),
    (lambda: Model.of("mine", nn.Sequential()), "model mine: expected at least one block"),
    (lambda: chain(linear(6, 3)).train(DataLoader([1, 2]), 1), "data: expected a source .*, got DataLoader"),
    (lambda: chain(linear(6, 3), metrics={"mine": lambda y, t: 0.5}).evaluate(Vectors(), 1), "metric mine: expected .*, got float"),
    (lambda: chain(linear(6, 3), loss=partial(F.cross_entropy, reduction="none")).train(Vectors(), 1), r"loss: .* float64\[4\]"),
    (lambda: chain(linear(6, 3)).train(Vectors(), -3), "microbatches: expected an integer >= 0, got -3"),
    (lambda: TwoFunctionCoupling(*[nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))] * 2), "g: expected .*, got a BatchNorm2d"),
    (
        lambda: ReversibleSequence([Coupling(linear(3, 3)), Coupling(RunningMean(False))])(*torch.randn(2, 4, 3).double()),
        r"block 1: expected buffers .*, got a change of f\.mean",
    ),
    (lambda: chain(linear(6, 3).eval()), "^model mine: expected modules in training mode"),
    (lambda: chain(linear(6, 3), optimizer=groups, learning_rate=lambda t: 0.1), r"^learning_rate: .* 0\.1, 0\.2, got a function"),
    *(
        (partial(Numerics, exact_streams=True, **{name: "bf16"}), f"^exact_streams: expected false with {name}=bf16, got true$")
        for name in ("message_format", "stored_format")
    ),
    (lambda: chain(linear(6, 3), optimizer=OPTIMIZERS["adam"]), r"learning_rate: expected a function, .* got None$"),
    (lambda: chain(linear(), Twice()), "outputs of block b1: expected 1 for loss, got 2"),
    (lambda: chain(nn.LazyLinear(6), linear(6, 3)), r"block b0 .*: expected tensors with shapes .*, got weight, bias"),
    (lambda: chain(nn.Sequential(nn.Tanh(), torch.jit.script(linear())), linear(6, 3)), "block b0 .*, got TorchScript in 1"),
    (lambda: chain(linear(6, 3), optimizer=lambda m: torch.optim.LBFGS(m.parameters())), "optimizer: .* no closure, .*, got LBFGS"),
    (lambda: chain(linear(6, 3), optimizer=lambda m: torch.optim.SparseAdam(m.parameters())), "optimizer: .*, got SparseAdam"),
    (lambda: make_pipeline(Model.of("mine", {"b": nn.Linear(6, 3)}), FLAT, optimizer=sgd), r"block b: .*, got float64\[4, 6\]"),
    kind=(ConfigError, ModelError),
)


def test_training_that_ends_before_the_first_update_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = chain(linear(6, 3), k=8)
    with caplog.at_level(logging.WARNING):
        pipeline.train(Vectors(), 3)
    assert caplog.messages == ["k=8: no update yet, after 3 microbatches; the weights have not changed"]
    caplog.clear()
    pipeline.train(Vectors(), 5)
    assert not caplog.messages


def test_a_pipeline_loads_its_state_dict() -> None:
    torch.manual_seed(0)
    pipeline = chain(linear(), linear(6, 3), stages=1)
    state = {key: torch.full_like(value, 0.25) for key, value in pipeline.state_dict().items()}
    pipeline.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in pipeline.state_dict().items())
    with pytest.raises(ModelError, match=r"contains other\.weight, but mine has no such block"):
        pipeline.load_state_dict(state | {"other.weight": torch.zeros(1)})
    del state["b0.bias"]
    with pytest.raises(ModelError, match=r"block b0 does not fit .*bias"):
        pipeline.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_a_pipeline_is_refused(copied: Callable[[Pipeline], Any]) -> None:
    pipeline = chain(linear(), linear(6, 3))
    with pytest.raises(ConfigError, match=r"^Pipeline: expected a new one .*load_state_dict.*, got a copy or a pickle of one$"):
        copied(pipeline).train(Vectors(), 2)
    network = copy.deepcopy(pipeline.plan.model), copy.deepcopy(dict(pipeline.blocks()))
    assert network[1].keys() == {"b0", "b1"}


class Detached(nn.Module):
    """A frozen layer whose output has no gradient."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_a_block_without_gradient_in_the_middle_equals_plain_pytorch() -> None:
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.1)  # weight decay would change a stage that gets zeros from the next one
    pipeline = chain(linear(), Detached(), linear(6, 3), method="reversible", optimizer=lambda m: optimizer(m.parameters()))
    data = Vectors()
    plain = pipeline.plan.model.build(0)
    pipeline.train(data, 4)
    train_plainly(plain, optimizer(plain.parameters()), data, 4)
    torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{"method": "pipedream_2bw", "k": 8}, {"remedy": Remedy(prediction="difference")}])
def test_loaded_weights_replace_older_and_predicted_ones(settings: dict[str, Any]) -> None:
    pipelines = []
    for _ in range(2):
        torch.manual_seed(0)
        pipelines.append(chain(linear(), linear(), linear(6, 3), **({"method": "delayed"} | settings)))
    trained, new = pipelines
    state = {key: value.clone() for key, value in trained.state_dict().items()}
    trained.train(Vectors(), 25)
    trained.load_state_dict(state)
    new.load_state_dict(state)
    for stage in range(3):  # the last one stores its graph, with a copy of the weights
        x, found = Vectors().inputs(0), []
        for pipeline in pipelines:
            runner = pipeline.stages[stage].runners[0]
            found.append(runner.function(0, (x,), runner.versions.for_forward(pipeline.microbatches_done))[0])
        torch.testing.assert_close(*found)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _from_the_middle(rank: int | None) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    blocks = (frozen(linear()), nn.Sequential(frozen(linear()), nn.Dropout(0.5)), linear(), nn.Tanh(), linear(6, 3))
    found, sizes = {}, []
    for method in ("dsp", "pipedream_2bw", "1f1b"):
        torch.manual_seed(0)
        pipeline = chain(*blocks, method=method, k=4, stages=4)
        pipeline.train(Vectors(), 12)
        found |= {f"{method} {key}": value.clone() for key, value in pipeline.state_dict().items()}
        sizes = [boundary.backward_bytes for boundary in pipeline.plan.boundaries]
        assert not any(stage.stored_bytes() for stage in pipeline.stages.values())
    return found, sizes


@pytest.mark.processes
def test_no_gradient_is_sent_to_stages_before_the_first_trained_one(tmp_path: Any) -> None:
    (alone, sizes), *parts = _from_the_middle(None), *run_processes(2, _from_the_middle, tmp_path)
    assert [size > 0 for size in sizes] == [False, False, True]
    assert_equal({key: value for part, _ in parts for key, value in part.items()}, alone)
    torch.manual_seed(0)
    blocks = (frozen(linear()), nn.Sequential(frozen(linear())), linear(), nn.Tanh(), linear(6, 3))
    pipeline = chain(*blocks, method="backprop", stages=4)
    plain, data = pipeline.plan.model.build(0), Vectors()
    pipeline.train(data, 4)
    train_plainly(plain, sgd(plain), data, 4)
    torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


# Blocks that read values, or hold tensors that are no parameters


class Recurrent(nn.Module):
    """Last output of a recurrent layer for a sequence of three equal vectors, with an initial state made in the forward pass."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(6, 6, batch_first=True).double()  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 6, dtype=torch.float64)
        before = (state, state) if isinstance(self.layer, nn.LSTM) else state
        return self.layer(x[:, None].expand(-1, 3, -1), before)[0][:, -1]


class OwnNoise(nn.Module):
    """A layer with noise from a generator of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def orthogonal() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(linear())


MADE = [*(partial(Recurrent, kind) for kind in (nn.GRU, nn.LSTM, nn.RNN)), orthogonal, OwnNoise]


@pytest.mark.parametrize("build", MADE, ids=["gru", "lstm", "rnn", "orthogonal", "own noise"])
def test_a_block_that_cannot_run_on_the_meta_device_trains_as_in_plain_pytorch(build: Callable[[], nn.Module]) -> None:
    model = Model("mine", (BlockSpec("a", linear), BlockSpec("b", build), BlockSpec("c", partial(linear, 6, 3))))
    state, keep = torch.get_rng_state(), Keep.GRAPH if build is OwnNoise else Keep.INPUT
    pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=Method("exact", 0, keep), stages=3)
    assert torch.equal(torch.get_rng_state(), state)
    plain = model.build(0)
    pipeline.train(Vectors(), 2)
    train_plainly(plain, sgd(plain), Vectors(), 2)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=0, atol=1e-12)


def test_noise_of_a_generator_of_the_blocks_own_cannot_be_repeated() -> None:
    pipeline = chain(linear(), OwnNoise(), linear(6, 3), method=Method("inputs", 0, Keep.INPUT))
    with pytest.raises(ModelError, match=r"block b1: expected the same output for the same input again \(random numbers"):
        pipeline.train(Vectors(), 2)


def test_a_block_that_cannot_run_on_the_meta_device_is_told_the_input_that_it_does_not_accept() -> None:
    model = Model("mine", (BlockSpec("a", partial(linear, 6, 5)), BlockSpec("b", orthogonal)))
    with pytest.raises(ModelError, match=r"block b: expected an input that it accepts, got float64\[4, 5\] from block a \(mat1"):
        model.profile(FLAT)
