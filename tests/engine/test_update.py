"""Updates of stages compared with plain autograd: clipping, averages, loss scale, non-finite values, state, hooks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Method, Model, NumericsError, Pipeline, TensorSpec, UpdateRules
from petra.engine.options.finite_check import FiniteCheck
from petra.engine.options.loss_scale import GROWTH_INTERVAL, LossScale
from petra.settings import Numerics
from petra.training import Checkpoints
from tests.support.nets import RandomSource, Recorder, assert_equal, gradients, make_pipeline, mixed, mixed_net, restored, sgd
from tests.support.refusals import refuses

SMALL, BROKEN = RandomSource(size=2), RandomSource(changes={4: lambda x: x * torch.inf})


def pipeline(rules: UpdateRules, method: str | Method = "reversible", **settings: object) -> Pipeline:
    return mixed(method=method, rules=rules, **{"k": 2, "stages": 3, "seed": 3, **settings})


def plain_training(
    steps: int, k: int = 2, clip: float | None = None, average: float | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Train the same network with plain PyTorch, clipped globally; return it and the moving average of its parameters."""
    data, net = RandomSource(), mixed_net().build(3)
    optimizer, means = sgd(net), {name: p.detach().clone() for name, p in net.named_parameters()}
    for update in range(steps):
        optimizer.zero_grad()
        for m in range(update * k, (update + 1) * k):
            (F.cross_entropy(net(data.inputs(m)), data.targets(m)) / k).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if average is not None:
            decay = min(average, (1 + update) / (10 + update))
            means = {name: decay * means[name] + (1 - decay) * p.detach() for name, p in net.named_parameters()}
    return net, means


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("method", ["reversible", "1f1b", "gpipe"])
def test_global_clipping_clips_the_gradient_of_the_whole_network(method: str) -> None:
    found = pipeline(UpdateRules(clip=0.2, clip_globally=True), method)
    found.train(RandomSource(), 5)  # the second call continues an incomplete accumulation
    found.train(RandomSource(), 3)
    assert_same(found.state_dict(), plain_training(4, clip=0.2)[0].state_dict())


test_invalid_rules_raise = refuses(
    lambda settings: pipeline(UpdateRules(**settings), "petra"),
    ({"clip": 0.0}, r"optim\.clip: expected null or a number > 0, got 0\.0"),
    ({"clip_globally": True}, r"optim\.clip_globally: expected false with optim\.clip=null, got true"),
    ({"clip": 1.0, "clip_globally": True}, r"optim\.clip_globally: expected false with method\.delay=2 and no flush"),
    ({"average": 1.0}, r"optim\.average: expected null or a number > 0 and < 1, got 1\.0"),
    ({"loss_scale": "big"}, r"optim\.loss_scale: expected null, a number > 0 or dynamic, got big"),
    ({"loss_scale": float("inf")}, r"optim\.loss_scale: expected null, a number > 0 or dynamic, got inf"),
    ({"loss_scale": 1000.0}, r"optim\.loss_scale: expected null, dynamic or a power of two, .*, got 1000\.0"),
    ({"nonfinite": "go"}, r"optim\.nonfinite: expected stop or skip, got go"),
)


def test_evaluation_uses_averaged_weights_and_training_does_not() -> None:
    found, data = pipeline(UpdateRules(average=0.9)), RandomSource()
    found.train(data, 8)
    net, means = plain_training(4, average=0.9)
    weights = net.state_dict()
    result = found.evaluate(data, 2)
    with found.averaged():
        assert found.evaluate(data, 2) == result, "inside the block, too"
        assert_same(found.state_dict(), weights | means)  # running statistics are not averaged
    net.load_state_dict(weights | means)
    net.eval()
    with torch.no_grad():
        expected = sum(F.cross_entropy(net(data.inputs(m)), data.targets(m)).item() for m in range(2)) / 2
    assert result.loss == pytest.approx(expected, rel=1e-9)
    found.train(data, 4)
    assert_same(found.state_dict(), plain_training(6)[0].state_dict())


@pytest.mark.parametrize(("scale", "method"), [(1024.0, "petra"), ("dynamic", "backprop")])
def test_a_loss_scale_without_overflow_changes_nothing(scale: float | str, method: str) -> None:
    """Multiplication by a power of two is exact."""
    scaled, plain = (pipeline(UpdateRules(loss_scale=s, clip=0.1), method) for s in (scale, None))  # type: ignore[arg-type]
    for run in (scaled, plain):
        run.train(RandomSource(), 9)
    assert_same(scaled.state_dict(), plain.state_dict(), rtol=1e-10)
    numbers = scaled.stage_metrics()
    assert numbers["stage/2/gradient_norm"] == pytest.approx(plain.stage_metrics()["stage/2/gradient_norm"])
    assert numbers["stage/2/loss_scale"] == (1024 if scale == 1024 else 2**16)


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_a_resumed_run_has_the_fixed_scale_that_it_asks_for(scale: Any, tmp_path: Path) -> None:
    """A dynamic one starts from that of the checkpoint, which is saved in the middle of an update."""
    runs = [pipeline(UpdateRules(loss_scale=s), "petra") for s in (1024.0, scale)]
    runs[0].train(RandomSource(), 5)
    Checkpoints(tmp_path).save(runs[0], {})
    for run in (runs[0], restored(runs[1], tmp_path)):
        run.train(RandomSource(), 3)
    assert runs[1].stage_metrics()["stage/1/loss_scale"] == (1024 if scale == "dynamic" else scale)
    assert_equal(runs[1].state_dict(), runs[0].state_dict())


class Shorter(nn.Module):
    """A linear layer in bfloat16, and one in the type of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8).bfloat16(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1).bfloat16()).to(x.dtype))  # type: ignore[no-any-return]


def test_clipping_does_not_round_its_factor_to_the_type_of_another_parameter() -> None:
    data, net = RandomSource(size=2, dtype=torch.float32), Model("short", (BlockSpec("all", Shorter),))
    run, plain = make_pipeline(net, data.spec, optimizer=Recorder, rules=UpdateRules(clip=0.123)), net.build(0)
    run.train(data, 1)
    F.cross_entropy(plain(data.inputs(0)), data.targets(0)).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.123)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(gradients(run)[name], p.grad, rtol=1e-5 if "second" in name else 1e-2, atol=1e-6)


class Overflow(torch.autograd.Function):
    """Identity whose gradient overflows above 20, as fp16 overflows above 65504."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return torch.where(dy.abs() > 20, torch.inf, dy)


class Limited(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Overflow.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


def limited(rules: UpdateRules, poison: float = 0.0) -> Pipeline:
    """Train three linear stages. The middle one's gradient overflows at large loss scales; ``poison`` is added to its weights."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), Limited(4, 4), nn.Linear(4, 5)]
    layers[1].weight.data += poison
    model = Model.of("limited", {name: layer.double() for name, layer in zip(("first", "middle", "last"), layers, strict=True)})
    return make_pipeline(model, SMALL.spec, method="petra", optimizer=sgd, rules=rules, seed=1)


def test_a_dynamic_scale_shrinks_only_in_the_overflowing_stage_and_grows_again() -> None:
    run = limited(UpdateRules(loss_scale="dynamic"))
    run.train(SMALL, 40)
    numbers = run.stage_metrics()
    assert numbers["stage/1/loss_scale"] == numbers["stage/3/loss_scale"] == 2**16
    assert 1 < numbers["stage/2/loss_scale"] < 2**12
    assert numbers["stage/2/skipped_updates"] == numbers["stage/1/skipped_updates"] > 0
    assert numbers["stage/3/skipped_updates"] == 0
    assert all(p.isfinite().all() for p in run.state_dict().values())
    last = run.workers[2].update.part(LossScale)
    assert last is not None
    last.load({"good": GROWTH_INTERVAL - 1, "scale": last.scale})
    run.train(SMALL, 1)
    assert run.stage_metrics()["stage/3/loss_scale"] == 2**17


def test_a_nan_raises_in_the_last_stage_or_is_skipped_and_weights_stay_unchanged() -> None:
    for nonfinite in ("stop", "skip"):
        run = limited(UpdateRules(nonfinite=nonfinite), poison=float("nan"))
        before = {key: value.clone() for key, value in run.state_dict().items() if "middle" not in key}
        if nonfinite == "stop":
            with pytest.raises(NumericsError, match="stage 3: non-finite loss or gradient"):
                run.train(SMALL, 5)
        else:
            run.train(SMALL, 5)
            assert run.stage_metrics()["stage/3/skipped_updates"] == 5
        assert all(torch.equal(value, run.state_dict()[key]) for key, value in before.items())


def test_overflow_with_a_fixed_scale_raises_and_names_the_stage() -> None:
    with pytest.raises(NumericsError, match="stage 2: non-finite gradient in the update after microbatch 1;") as error:
        limited(UpdateRules(loss_scale=2.0**16)).train(SMALL, 20)
    assert error.value.origin


def test_the_error_names_the_stage_that_sent_a_non_finite_gradient() -> None:
    run = limited(UpdateRules())
    update = run.workers[0].update
    check = update.part(FiniteCheck)
    assert check is not None
    check.add_received((torch.tensor([torch.nan], dtype=torch.float64),))
    run.stages[0].module[0][1].weight.grad.fill_(torch.nan)
    with pytest.raises(NumericsError, match="received from stage 2") as error:
        update(4)
    assert not error.value.origin


def test_the_stage_in_which_a_gradient_becomes_non_finite_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where only the last stage checks what it receives: later stages update before."""
    monkeypatch.setattr(Overflow, "backward", staticmethod(lambda ctx, dy: dy * torch.nan))
    with pytest.raises(NumericsError, match=r"^stage 2: non-finite gradient in the update after microbatch 1; the update") as error:
        limited(UpdateRules()).train(SMALL, 5)
    assert error.value.origin


def test_draining_inside_an_accumulation_finds_non_finite_gradients() -> None:
    """The check runs before a checkpoint could be written, although the update follows only after microbatch 6."""
    run = pipeline(UpdateRules(), "petra", k=3)
    run.train(BROKEN, 4)
    message = r"stage \d: non-finite gradient in the accumulation that began after microbatch 3"
    with pytest.raises(NumericsError, match=message):
        run.train(BROKEN, 1)


def test_non_finite_statistics_and_losses_raise() -> None:
    run = pipeline(UpdateRules(), "petra")
    run.train(RandomSource(), 2)
    next(m for m in run.stages[1].module.modules() if isinstance(m, nn.BatchNorm2d)).running_var[0] = torch.inf
    with pytest.raises(NumericsError, match="stage 2: non-finite running statistics after microbatch 4"):
        run.train(RandomSource(), 2)
    run = mixed(loss=lambda output, targets: F.cross_entropy(output, targets) + torch.inf)  # its gradient is finite
    with pytest.raises(NumericsError, match="stage 6: the loss is not finite in microbatches 1 to 3"):
        run.train(RandomSource(), 3)


def test_skipped_updates_restore_running_statistics() -> None:
    run = pipeline(UpdateRules(nonfinite="skip"), "petra", k=2)
    run.train(BROKEN, 8)
    assert all(value.isfinite().all() for value in run.state_dict().values())
    numbers = run.stage_metrics()
    assert numbers["stage/1/skipped_updates"] == 1
    assert 0 < numbers["stage/1/gradient_norm"] < float("inf")  # a mean without that of the skipped one
    assert run.evaluate(RandomSource(), 2).loss < 10


@pytest.mark.parametrize(("method", "bad"), [("reversible", 4), ("petra", 4), ("petra", 5)])
def test_statistics_that_a_skipped_update_restores_are_saved(method: str, bad: int, tmp_path: Path) -> None:
    """The checkpoint is saved inside the update that is skipped, before or after the microbatch that is not finite."""
    data = RandomSource(changes={bad: lambda x: x * torch.inf})
    whole, resumed = (pipeline(UpdateRules(nonfinite="skip"), method) for _ in range(2))
    whole.train(data, 5)
    Checkpoints(tmp_path).save(whole, {})
    for run in (whole, restored(resumed, tmp_path)):
        run.train(data, 5)
        assert all(value.isfinite().all() for value in run.state_dict().values())
    assert_equal(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("edited", [False, True])
def test_statistics_that_are_loaded_or_edited_outlast_a_skipped_update(edited: bool) -> None:
    run = pipeline(UpdateRules(nonfinite="skip"), "petra")
    run.train(RandomSource(), 3 * edited)  # an edit in the middle of an update
    state = {key: value + 0.25 for key, value in run.state_dict().items() if "running" in key}
    if edited:
        for key, value in state.items():
            run.state_dict()[key].copy_(value)
    else:
        run.load_state_dict(run.state_dict() | state)
    run.train(RandomSource(changes={3 * edited: lambda x: x * torch.inf}), 2 - edited)
    found = {key: value for key, value in run.state_dict().items() if key in state}
    assert_equal(found, state)


def test_overflow_of_the_sent_gradient_halves_the_scale() -> None:
    """The head's parameter gradients are small but its weights are large, so only the δ that it sends overflows in fp16."""
    torch.manual_seed(0)
    data, head = RandomSource(), nn.Linear(8, 5)
    head.weight.data.mul_(500)
    data.inputs = lambda m: 0.1 * torch.randn(4, 8, generator=data._generator(m, 0))  # type: ignore[method-assign]
    found = make_pipeline(
        Model.of("steep", {"first": nn.Linear(8, 8), "head": head}),
        TensorSpec((4, 8), torch.float32),
        method="petra",
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1e-4),
        numerics=Numerics(autocast=torch.float16),
        rules=UpdateRules(loss_scale="dynamic"),
    )
    found.train(data, 40)
    skipped = found.stage_metrics()["stage/1/skipped_updates"]
    assert 0 < skipped < 20
    found.train(data, 10)
    assert found.stage_metrics()["stage/1/skipped_updates"] == skipped
