"""The engine against every method and remedy written tick by tick from the papers' equations, in plain functions of its own."""

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import METHODS, Keep, Method, Model, Weights
from petra.reversible import Coupling, TwoFunctionCoupling
from tests.support.nets import RandomSource, make_pipeline, mixed_net
from tests.support.pairs import all_pairs
from tests.support.remedies import Remedy

RATE, MOMENTUM, DECAY, MICROBATCHES = 0.05, 0.9, 1e-3, 15
EPSILON = 1e-3  # of Adam, far above the rounding noise in gradients that are zero
CUTS = {"one block a stage": [1] * 6, "several blocks a stage": [2, 1, 3], "two stages": [4, 2]}
Values = list[Tensor]


def torch_sgd(module: nn.Module, nesterov: bool = True, **kernel: bool) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=nesterov, weight_decay=DECAY, **kernel)


class Sgd:
    """w ← w − lr·(a·v + b·g), v ← m·v + g; a = m, b = 1 is Nesterov's, a = 1, b = 0 plain momentum."""

    def __init__(self, weights: Values, a: float, b: float) -> None:
        self.a, self.b, self.v = a, b, [torch.zeros_like(w) for w in weights]

    def step(self, weights: Values, gradients: Values, lr: float) -> Values:
        gradients = [g + DECAY * w for g, w in zip(gradients, weights, strict=True)]
        self.v = [MOMENTUM * v + g for v, g in zip(self.v, gradients, strict=True)]
        return [w - lr * (self.a * v + self.b * g) for w, v, g in zip(weights, self.v, gradients, strict=True)]

    def velocity(self, lr: float) -> Values:
        return [-lr * v for v in self.v]


class Lookahead:
    """Ajanthan et al.: the iterate y and the point w = y + γ·(y − y before) at which gradients are taken."""

    def __init__(self, weights: Values, gamma: float) -> None:
        self.gamma, self.y = gamma, weights

    def step(self, weights: Values, gradients: Values, lr: float) -> Values:
        new = [w - lr * (1 - self.gamma) * (g + DECAY * w) for w, g in zip(weights, gradients, strict=True)]
        ahead = [y + self.gamma * (y - before) for y, before in zip(new, self.y, strict=True)]
        self.y = new
        return ahead

    def velocity(self, lr: float) -> Values:
        raise NotImplementedError


class Adam:
    """Kingma and Ba 2015, Algorithm 1."""

    def __init__(self, weights: Values) -> None:
        self.m = self.v = [torch.zeros_like(w) for w in weights]
        self.t = 0

    def step(self, weights: Values, gradients: Values, lr: float) -> Values:
        self.t += 1
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, gradients, strict=True)]
        self.v = [0.999 * v + 0.001 * g * g for v, g in zip(self.v, gradients, strict=True)]
        return [w + s for w, s in zip(weights, self.velocity(lr), strict=True)]

    def velocity(self, lr: float) -> Values:
        hats = ((m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)) for m, v in zip(self.m, self.v, strict=True))
        return [-lr * m / (v.sqrt() + EPSILON) for m, v in hats]


@dataclass
class Stage:
    """Weights by version, and what a remedy knows; parameters are flat lists over the stage's blocks."""

    blocks: list[nn.Module]
    remedy: Remedy
    late: float
    optimizer: Sgd | Lookahead | Adam
    versions: list[Values] = field(default_factory=list)
    sums: Values = field(default_factory=list)
    drift: Values = field(default_factory=list)
    last: Values = field(default_factory=list)
    predicted: Values | None = None
    corrected: Values | None = None
    clock: int = 0

    def __post_init__(self) -> None:
        self.versions = [[p.detach().clone() for block in self.blocks for p in block.parameters()]]
        self.sums = [torch.zeros_like(w) for w in self.now]
        self.drift = [torch.zeros_like(w) for w in self.now]

    @property
    def now(self) -> Values:
        return self.versions[-1]

    def of(self, i: int, weights: Values) -> Values:
        """The weights of block i among all."""
        counts = [len(list(block.parameters())) for block in self.blocks]
        return weights[sum(counts[:i]) : sum(counts[: i + 1])]

    def update(self) -> None:
        remedy, s = self.remedy, self.late
        power = 1 - min(self.clock / remedy.discount, 1) if remedy.discount else 0
        lr = RATE / max(1, s) ** power
        new = self.optimizer.step(self.now, self.braked(), lr)
        if s and remedy.feedback:
            own = [a - b for a, b in zip(new, self.now, strict=True)]
            c = remedy.feedback * s if self.last else 0.0
            new = [w + c * (u - v) for w, u, v in zip(new, own, self.last or own, strict=True)]
            self.last = own
        change = [a - b for a, b in zip(new, self.now, strict=True)]
        self.versions.append(new)
        self.sums = [torch.zeros_like(w) for w in new]
        if s and remedy.correction:
            gamma = remedy.correction ** (1 / s)
            self.drift = [gamma * d + (1 - gamma) * c for d, c in zip(self.drift, change, strict=True)]
            self.corrected = [w - s * d for w, d in zip(new, self.drift, strict=True)]
        if remedy.prediction != "none":
            self.predicted = self.foreseen(new, change, lr, remedy.horizon * s) if s else None

    def foreseen(self, weights: Values, change: Values, lr: float, updates: float) -> Values:
        steps = change if self.remedy.prediction == "difference" else self.optimizer.velocity(lr)
        return [w + updates * x for w, x in zip(weights, steps, strict=True)]

    def braked(self) -> Values:
        if not self.remedy.braking:
            return self.sums
        assert isinstance(self.optimizer, Sgd)
        cosines = (
            (g * v).sum() / (g.norm() * v.norm()) if v.any() else 0.0 for g, v in zip(self.sums, self.optimizer.v, strict=True)
        )
        return [g * (1 - self.remedy.braking * cosine) for g, cosine in zip(self.sums, cosines, strict=True)]


def with_weights(block: nn.Module, weights: Values) -> nn.Module:
    block = copy.deepcopy(block)
    for p, w in zip(block.parameters(), weights, strict=True):
        p.data = w.clone()
    return block


def streams(y: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def still(block: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return Φ(x) or F(x) with batch statistics. ``block`` is a copy whose running statistics nobody reads."""
    with torch.no_grad():
        return streams(block(*x))


def undone(block: nn.Module, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Φ⁻¹(y, θ), from the couplings' equations."""
    y1, y2 = y
    if isinstance(block, Coupling):
        return y2 - still(block.f, (y1,))[0], y1
    x2 = y2 - still(block.g, (y1,))[0]
    return y1 - still(block.f, (x2,))[0], x2


def with_graph(block: nn.Module, used: nn.Module, x: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Leaves and outputs of ``used``, the block with the weights in question; the block's running statistics move."""
    leaves = tuple(t.detach().clone().requires_grad_() for t in x)
    out = streams(used(*leaves))
    for mine, moved in zip(block.buffers(), used.buffers(), strict=True):
        mine.copy_(moved)
    return leaves, out


def tick_by_tick(net: list[Stage], data: RandomSource, method: Method, k: int) -> list[float]:
    """Trains the stages in place and returns the losses.

    A tick is two half ticks. Stage j (from 0) forwards microbatch m in half tick 2m + d·j, and takes it back, then maybe updates,
    in half tick 2m + d·(2(J − 1) − j) + 1. At d = 2 these are PETRA's Eq. 5: F in the first half, B in the second.
    """
    assert isinstance(method.delay, int)
    last, d = len(net) - 1, method.delay
    forward: dict[tuple[int, int], tuple[Tensor, ...]] = {(0, m): (data.inputs(m),) for m in range(MICROBATCHES)}
    back: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
    inputs: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
    graphs: dict[tuple[int, int, int], tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
    used: dict[tuple[int, int], Values] = {}
    losses = []
    for half in range(2 * MICROBATCHES + 2 * d * len(net)):
        for j, stage in enumerate(net):
            m, idle = divmod(half - d * j, 2)
            if not idle and 0 <= m < MICROBATCHES:
                x = forward.pop((j, m))
                used[j, m] = stage.now if stage.predicted is None else stage.predicted
                if method.weights is Weights.DOUBLE:  # PipeDream-2BW: W(b + 1) = W(b) − lr·∇f(W(b − 1))
                    used[j, m] = stage.versions[max(0, m // k - 1)]
                for i, block in enumerate(stage.blocks):
                    inputs[j, i, m] = x
                    mine = with_weights(block, stage.of(i, used[j, m]))
                    if method.keep is Keep.GRAPH:
                        graphs[j, i, m] = mine, *with_graph(block, mine, x)
                    x = still(mine, x)
                forward[j + 1, m] = x
            m, idle = divmod(half - d * (2 * last - j) - 1, 2)
            if idle or not 0 <= m < MICROBATCHES:
                continue
            if j == last:
                (output,) = forward.pop((j + 1, m))
                output = output.requires_grad_()
                loss = F.cross_entropy(output, data.targets(m))
                losses.append(loss.item())
                (gradient,) = torch.autograd.grad(loss, output)
                y, dy = (output.detach(),), (gradient,)
            else:
                y, dy = back.pop((j, m))
            current = stage.now if stage.corrected is None else stage.corrected
            weights = current if method.weights is Weights.CURRENT else used[j, m]
            found: list[Values] = []
            for i, block in reversed(list(enumerate(stage.blocks))):
                x = inputs.pop((j, i, m))
                if method.keep is Keep.NOTHING and isinstance(block, Coupling | TwoFunctionCoupling):
                    undoing = stage.now if method.weights is Weights.STASHED else weights
                    x = undone(with_weights(block, stage.of(i, undoing)), y)
                if method.keep is Keep.GRAPH:
                    mine, leaves, out = graphs.pop((j, i, m))
                    for p, w in zip(mine.parameters(), stage.of(i, weights), strict=True):
                        p.data.copy_(w)  # activations old, weights those in question
                else:
                    mine = with_weights(block, stage.of(i, weights))
                    leaves, out = with_graph(block, mine, x)
                gradients = torch.autograd.grad(out, [*leaves, *mine.parameters()], dy, allow_unused=True)
                found.insert(0, list(gradients[len(leaves) :]))
                y, dy = x, gradients[: len(leaves)]
            stale = [w - old for w, old in zip(stage.now, weights, strict=True)]
            joined, c = [g for block in found for g in block], stage.remedy.delay_compensation
            joined = [g + c * g * g * x for g, x in zip(joined, stale, strict=True)]
            stage.sums = [a + g / k for a, g in zip(stage.sums, joined, strict=True)]
            if j:
                back[j - 1, m] = y, tuple(stage.remedy.shrink * t for t in dy)
            stage.clock += 1
            if stage.clock % k == 0:
                stage.update()
    assert [stage.clock for stage in net] == [MICROBATCHES] * len(net)
    return losses


def require_equal(
    method: Method, k: int, cut: str = "several blocks a stage", remedy: Remedy | None = None, optimizer: str = "nesterov"
) -> None:
    remedy = remedy or Remedy()
    model, data = mixed_net(), RandomSource()
    losses: list[float] = []
    optimizers = {
        "nesterov": torch_sgd,
        "fused": partial(torch_sgd, fused=True),
        "heavy ball": partial(torch_sgd, nesterov=False),
        "adam": lambda module: torch.optim.Adam(module.parameters(), lr=RATE, eps=EPSILON),
    }
    settings = {"method": method, "remedy": remedy, "k": k, "optimizer": optimizers[optimizer]}
    pipeline = make_pipeline(model, data.spec, stages=CUTS[cut], learning_rate=lambda t: RATE, seed=8, **settings)
    pipeline.train(data, MICROBATCHES, on_microbatch=lambda report: losses.append(float(report[1] / report[0])))

    net = reference(model, method, k, CUTS[cut], remedy, optimizer)
    expected = tick_by_tick(net, data, method, k)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    found = pipeline.state_dict()
    blocks = [(block, stage.of(i, stage.now)) for stage in net for i, block in enumerate(stage.blocks)]
    for (block, weights), spec in zip(blocks, model.blocks, strict=True):
        parameters = dict(zip(dict(block.named_parameters()), weights, strict=True))
        for key, value in (parameters | dict(block.named_buffers())).items():
            torch.testing.assert_close(found[f"{spec.name}.{key}"], value, rtol=1e-9, atol=1e-10, msg=f"{spec.name}.{key}")


def reference(model: Model, method: Method, k: int, cut: list[int], remedy: Remedy, optimizer: str) -> list[Stage]:
    blocks = [model.build_block(i, 8) for i in range(len(model.blocks))]
    ends = [sum(cut[:j]) for j in range(len(cut) + 1)]
    stages = []
    for j, (a, b) in enumerate(pairwise(ends)):
        late = 1.0 if method.weights is Weights.DOUBLE else method.delay * (len(cut) - 1 - j) / k  # type: ignore[operator]
        weights = [p.detach().clone() for block in blocks[a:b] for p in block.parameters()]
        rule: Sgd | Lookahead | Adam = Sgd(weights, *((1, 0) if optimizer == "heavy ball" else (MOMENTUM, 1)))
        if optimizer == "adam":
            rule = Adam(weights)
        elif remedy.lookahead:
            rule = Lookahead(weights, remedy.lookahead)
        elif remedy.compensation:
            rule = Sgd(weights, MOMENTUM**late, (1 - MOMENTUM**late) / (1 - MOMENTUM))
        stages.append(Stage(blocks[a:b], remedy, late, rule))
    return stages


@pytest.mark.parametrize(("k", "d", "cut"), all_pairs([1, 2, 3], [1, 2], [*CUTS]))
def test_petra_equals_the_tick_equations(k: int, d: int, cut: str) -> None:
    require_equal(Method("petra", d, Keep.NOTHING), k, cut)


@pytest.mark.parametrize(
    ("method", "k"),
    [
        *[(METHODS[name], k) for name in ("delayed", "dsp", "reconstruct_stashed") for k in (1, 3)],
        (replace(METHODS["delayed"], keep=Keep.GRAPH), 1),
        (replace(METHODS["dsp"], keep=Keep.GRAPH), 1),
        (replace(METHODS["dsp"], keep=Keep.GRAPH), 3),
        (METHODS["pipedream"], 1),
        *[(replace(METHODS["pipedream_2bw"], keep=keep), 3) for keep in (Keep.GRAPH, Keep.INPUT, Keep.NOTHING)],
        (METHODS["pipedream_2bw"], 2),
    ],
    ids=lambda value: f"{value.name} {value.keep}" if isinstance(value, Method) else f"k={value}",
)
def test_every_asynchronous_method_equals_its_tick_equations(method: Method, k: int) -> None:
    require_equal(method, k, optimizer="fused" if method.keep is Keep.GRAPH and k == 3 else "nesterov")


@pytest.mark.parametrize(
    ("name", "k", "remedy", "optimizer"),
    [
        ("petra", 1, Remedy(discount=12), "nesterov"),
        ("petra", 1, Remedy(correction=0.135), "nesterov"),
        ("dsp", 3, Remedy(discount=9, correction=0.5), "nesterov"),
        ("petra", 1, Remedy(prediction="velocity"), "nesterov"),
        ("delayed", 3, Remedy(prediction="velocity", horizon=2.0), "heavy ball"),
        ("dsp", 1, Remedy(prediction="velocity"), "adam"),
        ("petra", 3, Remedy(prediction="difference"), "adam"),
        ("petra", 1, Remedy(compensation=True), "nesterov"),
        ("petra", 3, Remedy(compensation=True), "heavy ball"),
        ("dsp", 1, Remedy(compensation=True, prediction="velocity"), "heavy ball"),
        ("petra", 1, Remedy(compensation=True, prediction="difference"), "heavy ball"),
        ("petra", 1, Remedy(shrink=0.7), "nesterov"),
        ("petra", 1, Remedy(lookahead=0.95), "nesterov"),
        ("pipedream", 1, Remedy(lookahead=0.95), "heavy ball"),
        ("petra", 3, Remedy(feedback=0.5), "nesterov"),
        ("pipedream_2bw", 3, Remedy(feedback=1.0), "adam"),
        ("petra", 1, Remedy(braking=0.5), "heavy ball"),
        ("delayed", 3, Remedy(delay_compensation=3.0), "nesterov"),
        ("reconstruct_stashed", 1, Remedy(delay_compensation=3.0), "nesterov"),
        ("pipedream_2bw", 2, Remedy(delay_compensation=3.0), "adam"),
        ("petra", 1, Remedy(9, 0.3, "difference", 1.5, True, 0.9), "nesterov"),
    ],
    ids=str,
)
def test_every_remedy_equals_its_tick_equations(name: str, k: int, remedy: Remedy, optimizer: str) -> None:
    require_equal(METHODS[name], k, remedy=remedy, optimizer=optimizer)
