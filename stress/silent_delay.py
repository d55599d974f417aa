"""Try methods with delay, several processes, ``petra train`` and ``PetraTrainer`` in ways that could train other weights silently.

``python -m stress.silent_delay``

Methods with delay are compared with :class:`Simulated`, plain PyTorch that follows Algorithm 1 of PETRA stage by stage: weights
must be equal ("right"), or a call is refused in one line. ``PetraTrainer`` is compared with ``Trainer``.
"""

import copy
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import BlockSpec, Keep, Method, Model, Pipeline, Recipe, UpdateRules, Weights
from petra.reversible import Coupling
from stress.frame import run_tries
from stress.silent_blocks import Halves, Own
from stress.silent_library import C, D, Data, tries_of
from tests.support import commands
from tests.support.commands import TINY, lines
from tests.support.processes import run_processes

AREAS = ("delay", "processes", "commands", "trainer")
Streams = tuple[Tensor, ...]


def function() -> nn.Module:
    return nn.Sequential(nn.Linear(D // 2, D // 2), nn.Tanh())


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "first": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()),
    "split": Halves,
    "c0": lambda: Coupling(function()),
    "c1": lambda: Coupling(function()),
    "merge": Halves,
    "head": lambda: nn.Linear(D, C),
}


def model_of(**others: Callable[[], nn.Module]) -> Model:
    """Return the model of this file, with other builders of some blocks."""
    builds = {**BUILDS, **others}
    return Model("delayed", tuple(BlockSpec(name, lambda build=build: build().double()) for name, build in builds.items()))


class Simulated:
    """Stages of plain modules with PETRA's order of work, in which each stage has its weights and its clock.

    Args:
        blocks: Modules of each stage.
        delays: Delay of each stage in microbatches.
        optimizer: Makes the optimizer of a stage.
        reconstruct: Whether couplings compute their input from their output; otherwise each block stores its input.
        stashed: Whether a backward pass uses the weights of the forward pass.
        act: Called with the parameters of a stage before its step, after the rate has been set.
        after: Called with the optimizer of a stage after its step.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Module]],
        delays: Sequence[int],
        optimizer: Callable[[nn.Module], Any],
        k: int,
        *,
        reconstruct: bool = True,
        stashed: bool = False,
        loss: Callable[..., Tensor] = F.cross_entropy,
        rate: Callable[[int], float] | None = None,
        act: Callable[[list[nn.Parameter]], object] = lambda parameters: None,
        after: Callable[[Any], object] = lambda optimizer: None,
    ) -> None:
        self.blocks, self.delays, self.k, self.loss, self.rate, self.act, self.after = blocks, delays, k, loss, rate, act, after
        self.stashed, self.reconstruct, self.done = stashed, reconstruct, [0] * len(blocks)
        trained = [any(p.requires_grad for block in stage for p in block.parameters()) for stage in blocks]
        self.optimizers = [optimizer(nn.ModuleList(s)) if own else None for s, own in zip(blocks, trained, strict=True)]
        self.inputs: dict[tuple[int, int, int], Streams] = {}
        self.old: dict[tuple[int, int], list[Tensor]] = {}
        for stage in blocks:
            for block in stage:
                block.zero_grad()

    def train(self, data: Any, start: int, end: int) -> None:
        last = len(self.blocks) - 1
        orders = [self._order(delay, start, end) for delay in self.delays]
        forwards: dict[int, dict[int, Streams]] = defaultdict(dict)
        backwards: dict[int, dict[int, tuple[Streams, Streams]]] = defaultdict(dict)
        forwards[0] = {m: (data.inputs(m),) for m in range(start, end)}
        while any(orders):
            for j, order in enumerate(orders):
                if not order:
                    continue
                kind, m = order[0]
                if kind == "F" and m in forwards[j]:
                    y = self._forward(j, m, forwards[j].pop(m))
                    if j == last:
                        (output,) = (t.detach().requires_grad_() for t in y)
                        backwards[j][m] = y, torch.autograd.grad(self.loss(output, data.targets(m)), output)
                    else:
                        forwards[j + 1][m] = y
                elif kind == "B" and m in backwards[j]:
                    found = self._backward(j, m, *backwards[j].pop(m))
                    if j:
                        backwards[j - 1][m] = found
                else:
                    continue
                order.pop(0)

    @staticmethod
    def _order(delay: int, start: int, end: int) -> list[tuple[str, int]]:
        order = [("F", m) for m in range(start, min(start + delay, end))]
        for m in range(start, end):
            order += [("F", m + delay)] * (m + delay < end) + [("B", m)]
        return order

    @torch.no_grad()
    def _forward(self, j: int, m: int, x: Streams) -> Streams:
        if self.stashed:
            self.old[j, m] = [p.detach().clone() for block in self.blocks[j] for p in block.parameters()]
        for b, block in enumerate(self.blocks[j]):
            self.inputs[j, b, m] = x
            norms = [layer for layer in block.modules() if isinstance(layer, nn.BatchNorm1d)]
            for layer in norms:
                layer.track_running_stats = False
            y = (x[1], x[0] + block.f(x[1])) if isinstance(block, Coupling) else block(*x)
            for layer in norms:
                layer.track_running_stats = True
            x = y if isinstance(y, tuple) else (y,)
        return x

    def _backward(self, j: int, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams]:
        parameters = [p for block in self.blocks[j] for p in block.parameters()]
        current = [p.detach().clone() for p in parameters]
        if self.stashed:
            for p, old in zip(parameters, self.old.pop((j, m)), strict=True):
                p.data = old
        for b in reversed(range(len(self.blocks[j]))):
            block, stored = self.blocks[j][b], self.inputs.pop((j, b, m))
            if isinstance(block, Coupling):
                x2 = (y[0] if self.reconstruct else stored[1]).detach().requires_grad_()
                f = block.f(x2)
                y = (y[1] - f.detach(), y[0]) if self.reconstruct else stored
                f.backward(dy[1])
                dy = dy[1], dy[0] + x2.grad  # type: ignore[operator]
            else:
                x = tuple(t.detach().requires_grad_() for t in stored)
                found = block(*x)
                torch.autograd.backward(found if isinstance(found, tuple) else (found,), dy)
                y, dy = stored, tuple(t.grad for t in x)  # type: ignore[misc]
        for p, value in zip(parameters, current, strict=True):
            p.data = value
        self.done[j] += 1
        if self.done[j] % self.k == 0 and self.optimizers[j] is not None:
            self._update(j, parameters)
        return y, dy

    def _update(self, j: int, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = None if p.grad is None else p.grad / self.k
        for group in self.optimizers[j].param_groups if self.rate else ():
            group["lr"] = self.rate(self.done[j])  # type: ignore[misc]
        self.act(parameters)
        self.optimizers[j].step()
        self.after(self.optimizers[j])
        self.optimizers[j].zero_grad()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def compared(
    calls: Sequence[int] = (9, 6),
    *,
    method: Any = "petra",
    delay: int = 2,
    k: int = 2,
    stages: Any = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    between: Callable[[dict[str, nn.Module]], object] = lambda blocks: None,
    extra: Callable[[Pipeline], object] = lambda pipeline: None,
    recipe: dict[str, Any] | None = None,
    builds: dict[str, Callable[[], nn.Module]] | None = None,
    tolerance: float = 1e-10,
    **simulated: Any,
) -> bool:
    """Train by calls of some microbatches, and compare weights and buffers with the simulation."""
    data, model = Data(), model_of(**(builds or {}))
    pipeline = Pipeline(model, Data.spec, Recipe(optimizer, **(recipe or {})), method=method, k=k, stages=stages)
    blocks = {name: copy.deepcopy(block) for name, block in pipeline.blocks()}
    named = [[blocks[model.blocks[b].name] for b in stage.blocks] for stage in pipeline.plan.stages]
    delays = [delay * (len(named) - 1 - j) for j in range(len(named))]
    simulation, done = Simulated(named, delays, optimizer, k, **simulated), 0
    for count in calls:
        pipeline.train(data, count)
        simulation.train(data, done, done + count)
        done += count
        extra(pipeline)
        if count != calls[-1]:
            between(dict(pipeline.blocks()))
            between(blocks)
    found = {f"{name}.{key}": t for name, block in blocks.items() for key, t in block.state_dict().items()}
    own = pipeline.state_dict()
    return all((own[key].double() - t.double()).abs().max() <= tolerance for key, t in found.items())


def delay_of_two_with_couplings() -> bool:
    return compared()


def delay_with_adam_and_decoupled_decay() -> bool:
    return compared(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1), tolerance=1e-9)


def delay_with_a_schedule_on_each_stages_clock() -> bool:
    rate = lambda t: 0.2 / math.sqrt(t)  # noqa: E731
    return compared((12,), recipe={"learning_rate": rate}, rate=rate)


def delay_with_calls_that_end_within_an_update() -> bool:
    return compared((4, 1, 7, 2), k=3)


def delay_with_calls_shorter_than_the_pipeline() -> bool:
    return compared((3, 2, 5), k=1)


def delay_with_clipping_of_each_stage() -> bool:
    clip = lambda parameters: nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 0.05)  # noqa: E731
    return compared(recipe={"rules": UpdateRules(clip=0.05)}, act=clip)


def delay_with_a_frozen_first_block() -> bool:
    return compared(builds={"first": lambda: BUILDS["first"]().requires_grad_(False)})


def delay_with_batch_normalisation_in_a_stored_block() -> bool:
    return compared(builds={"first": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh())})


def delay_with_several_blocks_in_a_stage() -> bool:
    return compared(stages=[2, 2, 2])


def delay_of_one_with_stored_inputs() -> bool:
    return compared(method=Method("one", 1, Keep.INPUT), delay=1, reconstruct=False)


def delay_of_dsp() -> bool:
    return compared(method="dsp", reconstruct=False)


def delay_of_stashed_weights_in_a_user_method() -> bool:
    method = Method("mine", 3, Keep.INPUT, weights=Weights.STASHED)
    return compared((11, 9), method=method, delay=3, reconstruct=False, stashed=True)


def delay_with_weights_scaled_between_calls() -> bool:
    @torch.no_grad()
    def scale(blocks: dict[str, nn.Module]) -> None:
        for p in blocks["c0"].parameters():
            p.mul_(0.5)

    return compared((8, 8), between=scale)


def delay_with_evaluations_between_calls() -> bool:
    return compared((5, 4, 6), extra=lambda pipeline: pipeline.evaluate(Data(), 3))


def delay_with_rates_by_parameter_group() -> bool:
    def make(module: nn.Module) -> Any:
        parts = [[p for p in module.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
        return torch.optim.RMSprop([{"params": part, "lr": lr} for part, lr in zip(parts, (0.01, 0.003), strict=True) if part])

    return compared(optimizer=make, tolerance=1e-9)


def delay_with_a_loss_that_smooths_labels() -> bool:
    loss = partial(F.cross_entropy, label_smoothing=0.2)
    return compared(recipe={"loss": loss}, loss=loss)


def delay_with_an_optimizer_that_reads_its_parameters_norm() -> bool:
    class Trust(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / (1 + p.grad.norm()))
            super().step()

    return compared(optimizer=lambda m: Trust(m.parameters(), lr=0.1))


def delay_with_a_function_that_scales_by_its_own_parameter() -> bool:
    def scaled(own: Any, x: Tensor) -> Tensor:
        y: Tensor = own.linear(x).sin() * own.scale
        return y

    return compared(builds={"c1": lambda: Coupling(Own(scaled, D // 2, scale=nn.Parameter(torch.ones(()))))})


def trained_by_rank(rank: int, k: int, calls: tuple[int, ...], method: str) -> dict[str, Tensor]:
    """Return the weights of a rank."""
    recipe = Recipe(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), lambda t: 0.02 / t)
    pipeline = Pipeline(model_of(), Data.spec, recipe, method=method, k=k)
    for count in calls:
        pipeline.train(Data(), count)
    return pipeline.state_dict()


def in_processes(world: int, k: int, calls: tuple[int, ...], method: str = "petra") -> bool:
    """Compare processes with the simulation."""
    model = model_of()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            key: t for part in run_processes(world, trained_by_rank, Path(folder), k, calls, method) for key, t in part.items()
        }
    blocks = {block.name: model.build_block(i, 0) for i, block in enumerate(model.blocks)}
    delays = [2 * (len(blocks) - 1 - j) for j in range(len(blocks))]
    optimizer = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)  # noqa: E731
    plain, done = Simulated([[b] for b in blocks.values()], delays, optimizer, k, rate=lambda t: 0.02 / t), 0
    plain.reconstruct = method == "petra"
    for count in calls:
        plain.train(Data(), done, done + count)
        done += count
    expected = {f"{name}.{key}": t for name, block in blocks.items() for key, t in block.state_dict().items()}
    return found.keys() == expected.keys() and all((found[key] - t).abs().max() < 1e-9 for key, t in expected.items())


def processes_two_with_calls_within_an_update() -> bool:
    return in_processes(2, 3, (4, 5))


def processes_three_with_stored_inputs() -> bool:
    return in_processes(3, 2, (7, 2), "dsp")


def commands_rates_of_updates() -> bool:
    """Rates in updates.jsonl against the formula: for 256 samples per update, a warm-up of an epoch, 0.1 of it from epoch 2 on."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("trainer.epochs=3", "schedule.warmup_epochs=1", "schedule.milestones=[2]", "optim.lr=0.5", "trainer.log_every=1")
        commands.train(*TINY, *words, "k=2", "data.size=8", f"run_dir={folder}/run")
        rows = lines(Path(folder) / "run" / "updates.jsonl")
    expected = [0.5 * 2 * 8 / 256 * min(1, t / 8) * (0.1 if t > 16 else 1) for t in range(2, 25, 2)]
    return [row["update/learning_rate"] for row in rows] == expected


def commands_metrics_of_a_resumed_run() -> bool:
    """A run of four epochs, and one of two that is continued to four, have the same losses; the second reads half of its rows."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        words = (*TINY, "data.size=8", "k=3", "trainer.stages=3", "schedule.warmup_epochs=0")
        for name, parts in (("a", (4,)), ("b", (2, 4))):
            for epochs in parts:
                commands.train(*words, f"trainer.epochs={epochs}", f"run_dir={folder}/{name}", "resume=auto")
            found.append([(row["train_loss"], row["test_loss"]) for row in lines(Path(folder) / name / "metrics.jsonl")])
    return len(found[0]) == 4 and found[0] == found[1]


def by_both_trainers(**settings: Any) -> bool:
    """Compare the losses of each step of ``Trainer`` and ``PetraTrainer``."""
    from transformers import Trainer

    from petra.huggingface import PetraTrainer
    from tests.huggingface.models import tiny
    from tests.huggingface.test_trainer import arguments, losses, rows

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, own in ((Trainer, {}), (PetraTrainer, {"stages": 2})):
            args = arguments(Path(folder) / kind.__name__, **{"max_steps": 6, "gradient_accumulation_steps": 2, **settings})
            trainer = kind(tiny("LlamaForCausalLM", torch.float32), args, train_dataset=rows(40), **own)
            trainer.train()
            found.append(losses(trainer))
    return all(math.isclose(a[0], b[0], rel_tol=1e-4) and a[1:] == b[1:] for a, b in zip(*found, strict=True))


def trainer_with_adafactor() -> bool:
    return by_both_trainers(optim="adafactor")


def trainer_with_noise_on_embeddings() -> bool:
    return by_both_trainers(neftune_noise_alpha=5.0)


def trainer_with_restarts_of_the_rate() -> bool:
    return by_both_trainers(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2})


if __name__ == "__main__":
    run_tries(__doc__, tries_of(globals(), AREAS))
