"""Optimizers against their formulas, and schedules against closed forms at every update of a pipeline."""

import math

import pytest
import torch
from torch import Tensor, nn

from petra import ConfigError, Model
from petra.training import Cosine, MultiStep, Polynomial, peak_rate
from petra.training.optim import OPTIMIZERS
from tests.support.nets import RandomSource, make_pipeline

RATE, DECAY, EPS = 0.02, 0.1, 1e-6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)).double()


class Words(nn.Module):
    """An embedding, two matrices of which one is wide, vectors, and a matrix outside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.square, self.wide, self.norm = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3), nn.LayerNorm(6)
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.double()


def gradients(module: nn.Module, steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.parameters()] for _ in range(steps)]


def stepped(module: nn.Module, *optimizers: torch.optim.Optimizer, rate: float = RATE, steps: int = 3) -> list[Tensor]:
    """Step with random gradients; return the parameters."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate
    for found in gradients(module, steps):
        for p, g in zip(module.parameters(), found, strict=True):
            p.grad = g
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_biases_and_normalisation_do_not_decay(name: str) -> None:
    module = net()
    for group in OPTIMIZERS[name](module, weight_decay=0.25).param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.25 if p.dim() > 1 else 0.0)
    frozen = net()
    frozen.requires_grad_(False)
    frozen[3].weight.requires_grad_()
    assert sum(len(group["params"]) for group in OPTIMIZERS[name](frozen).param_groups) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_device_skips_changes_nothing(name: str) -> None:
    """Optimizers that skip updates by ``found_inf``, as on a GPU: a skipped first step leaves a valid state."""
    module, other = net(), net()
    optimizer = OPTIMIZERS[name](module)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    for skips in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(skips)  # type: ignore[attr-defined]
        found = stepped(module, optimizer, rate=0.1)
        expected = [*net().parameters()] if skips else stepped(other, OPTIMIZERS[name](other), rate=0.1)
        torch.testing.assert_close(found, [p.detach() for p in expected], rtol=1e-12, atol=0)


def test_muon_takes_projections_and_matrices_and_adamw_the_rest() -> None:
    table, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = table.weight  # a shared embedding is none
    attention, joint = (nn.MultiheadAttention(4, 2, bias=False, **sizes) for sizes in ({"kdim": 3, "vdim": 6}, {}))
    turned = type("Conv1D", (nn.ParameterDict,), {})({"weight": torch.zeros(7, 2)})  # the linear layer of transformers' GPT-2
    muon = OPTIMIZERS["muon"](nn.ModuleList([table, head, attention, joint, turned]))
    taken = [tuple(p.shape) for p in muon.param_groups[0]["params"]]
    assert sorted(taken) == [(4, 3), (4, 4), (4, 4), (4, 4), (4, 6), (7, 2), (12, 4)]
    module, expected = Words(), Words()
    matrices = [expected.square.weight, expected.wide.weight]
    rest = [p for p in expected.parameters() if all(p is not m for m in matrices)]
    groups = [{"params": [p for p in rest if p.dim() == d], "weight_decay": DECAY * (d > 1)} for d in (1, 2)]
    reference = torch.optim.Muon(matrices, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    wanted = stepped(expected, reference, torch.optim.AdamW(groups, foreach=False))
    torch.testing.assert_close(stepped(module, OPTIMIZERS["muon"](module, weight_decay=DECAY)), wanted, rtol=1e-5, atol=1e-6)


PER_EPOCH, EPOCHS, WARMUP, K, PEAK = 4, 200, 5, 3, 0.4


def closed_form(name: str, t: int) -> float:
    """Return the rate at microbatch t = 1 … 800 of 200 epochs, computed without the code under test."""
    ramp = min(1.0, t / 20)
    if name == "multistep":
        return PEAK * ramp * (1.0 if t <= 240 else 0.2 if t <= 480 else 0.04 if t <= 640 else 0.008)
    share = max(0.0, (t - 21) / 780)
    return PEAK * ramp * (0.5 * (1 + math.cos(math.pi * share)) if name == "cosine" else (1 - share) ** 2)


SCHEDULES = {"multistep": MultiStep, "cosine": Cosine, "polynomial": Polynomial}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_follows_a_schedule_of_200_epochs_at_every_update(name: str) -> None:
    settings = {"milestones": [60, 120, 160], "gamma": 0.2} if name == "multistep" else {}
    rate = SCHEDULES[name](PEAK, PER_EPOCH, EPOCHS, warmup_epochs=WARMUP, **settings)
    seen: dict[int, list[float]] = {}

    class Spy(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            seen.setdefault(id(self), []).append(self.param_groups[0]["lr"])

    layers = {"first": nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), "middle": nn.Linear(2, 2), "head": nn.Linear(2, 5)}
    data = RandomSource(batch=1, size=2, dtype=torch.float32)
    settings = {"k": K, "optimizer": lambda m: Spy(m.parameters(), lr=9.0), "learning_rate": rate}
    pipeline = make_pipeline(Model.of("tiny", layers), data.spec, method="petra", **settings)
    for microbatches in (300, 500):
        pipeline.train(data, microbatches)
    expected = [closed_form(name, t) for t in range(K, PER_EPOCH * EPOCHS + 1, K)]
    assert len(seen) == 3
    for rates in seen.values():
        assert rates == pytest.approx(expected, rel=1e-12)


def test_schedules_check_their_values() -> None:
    number = r"peak: expected a number >= 0, got"
    for build, peak, settings, message in (
        *((Polynomial, 0.1, {"power": power}, r"schedule\.power: expected") for power in (0.0, math.inf)),
        *((Polynomial, 0.1, {"final": final}, r"schedule\.final: expected a number >= 0") for final in (-0.1, 0.2)),
        (MultiStep, 0.1, {"warmup_epochs": math.nan}, r"schedule\.warmup_epochs: expected a number >= 0, got nan"),
        *((MultiStep, peak, {}, number) for peak in (math.inf, -1.0)),
        (MultiStep, 0.1, {"gamma": 2.0}, r"schedule\.gamma: expected"),
        *((MultiStep, 0.1, {"milestones": wrong}, r"schedule\.milestones: expected") for wrong in ([3, 2], [2, 2], [0, 1])),
    ):
        with pytest.raises(ConfigError, match=message):
            build(peak, 10, 5, **settings)
    assert MultiStep(peak=0.5, microbatches_per_epoch=10, epochs=3)(1) == 0.5  # without a warm-up
    rate = MultiStep(peak=1.0, microbatches_per_epoch=10, epochs=6, warmup_epochs=4, milestones=[1])
    assert [rate(10), rate(11), rate(40)] == pytest.approx([10 / 40, 0.1 * 11 / 40, 0.1])  # a milestone scales the ramp
    assert peak_rate(0.1, batch_size=64, k=1) == 0.1 * 64 / 256


def test_basis_rotation_is_adam_in_the_rotated_basis() -> None:
    module, reference = Words(), [p.detach().clone() for p in Words().parameters()]
    optimizer = OPTIMIZERS["basis_rotation"](module, betas=[0.8, 0.9], eps=EPS, weight_decay=DECAY, frequency=3)
    result = stepped(module, optimizer, steps=8)
    rotated = {i for i, (name, p) in enumerate(module.named_parameters()) if name in ("square.weight", "wide.weight")}
    m, v = ([torch.zeros_like(w) for w in reference] for _ in range(2))
    covariances: dict[int, list[Tensor]] = {i: [torch.zeros(n, n).double() for n in reference[i].shape] for i in rotated}
    bases: dict[int, list[Tensor]] = {}
    for t, found in enumerate(gradients(module, 8), 1):
        for i, g in enumerate(found):
            u, w = None, None
            if i in rotated:
                products = (g @ g.T, g.T @ g)
                covariances[i] = [0.9 * c + (1 - 0.9) * new for c, new in zip(covariances[i], products, strict=True)]
                if t == 1:
                    bases[i] = [torch.linalg.eigh(c)[1].flip(1) for c in covariances[i]]
                elif t % 3 == 0:
                    for side in (0, 1):
                        basis, covariance = bases[i][side], covariances[i][side]
                        order = torch.diag(basis.T @ covariance @ basis).argsort(descending=True)
                        v[i] = v[i][order] if side == 0 else v[i][:, order]
                        bases[i][side] = torch.linalg.qr(covariance @ basis[:, order])[0]
                u, w = bases[i]
            m[i] = 0.8 * m[i] + 0.2 * g
            inner, momentum = (g, m[i]) if u is None or w is None else (u.T @ g @ w, u.T @ m[i] @ w)
            v[i] = 0.9 * v[i] + 0.1 * inner**2
            change = momentum / (1 - 0.8**t) / ((v[i] / (1 - 0.9**t)).sqrt() + EPS)
            change = change if u is None or w is None else u @ change @ w.T
            decay = RATE * DECAY if g.dim() > 1 else 0.0
            reference[i] = reference[i] * (1 - decay) - RATE * change
    torch.testing.assert_close(result, reference, rtol=1e-8, atol=1e-10)


def test_muon_takes_a_transposed_matrix() -> None:
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(torch.randn(4, 6).t())
    same = nn.Parameter(module.weight.detach().clone())
    module.weight.grad = torch.randn(6, 4)
    same.grad = module.weight.grad.clone()
    muon = OPTIMIZERS["muon"](module, weight_decay=DECAY)
    for group in muon.param_groups:
        group["lr"] = 0.1
    muon.step()
    torch.optim.Muon([same], lr=0.1, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(module.weight, same)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_muon_with_filters_makes_the_updates_of_torchs_muon_on_flattened_filters(form: torch.memory_format) -> None:
    """Gradients may have another memory format than the filters, and the momentum that of a checkpoint."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)).to(memory_format=form)
    weights = [layer.weight for layer in module]
    flat = [nn.Parameter(w.detach().flatten(1).clone()) for w in weights]
    muon = OPTIMIZERS["muon"](module, weight_decay=DECAY, filters=True)
    reference = torch.optim.Muon(flat, lr=0.1, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for w, matrix in zip(weights, flat, strict=True):
            w.grad = torch.randn(w.shape)
            matrix.grad = w.grad.flatten(1)
            if step == 2:
                muon.state[w]["momentum_buffer"] = muon.state[w]["momentum_buffer"].clone(memory_format=torch.contiguous_format)
        for group in muon.param_groups:
            group["lr"] = 0.1
        muon.step()
        reference.step()
    for w, matrix in zip(weights, flat, strict=True):
        # Newton-Schulz iterates in bf16, so the order of columns changes its rounding
        torch.testing.assert_close(w.detach().flatten(1), matrix.detach(), rtol=0, atol=2e-3)
