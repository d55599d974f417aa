"""Build one rank's part of a pipeline from a plan: stages, their updates, and the workers that run them.

Options are imported where a run asks for them, so that other runs do not load them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from petra.engine.accumulation import Accumulation
from petra.engine.block import Fetch, block_runner
from petra.engine.block_function import Around, BlockFunction
from petra.engine.options.finite_check import CheckedPort, FiniteCheck
from petra.engine.recipe import Recipe
from petra.engine.stage import Stage
from petra.engine.update import Clip, GradientNorm, OptimizerStep, Part, ScaleGradients, Update
from petra.engine.weights import WeightVersions
from petra.engine.worker import Worker
from petra.errors import ConfigError, ModelError, PetraError, first_line, invalid, require
from petra.method import Keep, Weights
from petra.plan import Plan
from petra.plan.messages import returns_activations
from petra.reversible import Grid, derive_seed
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec, is_side
from petra.transport import Port


def build_stages(
    plan: Plan, recipe: Recipe, runtime: Runtime, device: torch.device, place: tuple[int, int], fetch: Fetch
) -> dict[int, Stage]:
    """Build the stages of a rank, by index. Weights depend on the seed and the block only, not on the partition.

    Args:
        place: Index of the rank's replica, and of its process in the replica.
        fetch: Returns the inputs of a microbatch again, on the device; for plans that refetch.
    """
    replica, process = place
    # The first replica draws the random numbers of a run without replicas.
    seed = derive_seed(recipe.seed, -1, replica) if replica else recipe.seed
    stages = {}
    for j in plan.layout.processes[process]:
        own = plan.stages[j]
        stage = stages[j] = make_stage(
            [_block(plan, recipe, runtime, device, b) for b in own.blocks],
            own.keeps,
            first_block=own.blocks.start,
            weights=own.weights,
            k=plan.k,
            seed=seed,
            numerics=plan.numerics,
            grid=_grid(plan, device),
            overwritten=own.staleness > 0 and own.weights is Weights.CURRENT,
            returns_input=j > 0 and returns_activations(plan.stages[j - 1].keeps[-1]),
            outputs=own.outputs,
            fetch=fetch,
        )
        for b, runner in zip(own.blocks, stage.runners, strict=True):
            runner.function.name = f"block {plan.model.blocks[b].name}"
        for extension in recipe.extensions:
            stage.runners = [extension.wrap_runner(runner) for runner in stage.runners]
    return stages


def make_stage(
    blocks: Sequence[nn.Module],
    keeps: Sequence[Keep],
    *,
    first_block: int = 0,
    weights: Weights = Weights.CURRENT,
    k: int = 1,
    seed: int = 0,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    grid: Grid | None = None,
    overwritten: bool = False,
    returns_input: bool = True,
    outputs: Sequence[TensorSpec] = (),
    fetch: Fetch | None = None,
) -> Stage:
    """Build a stage, of a pipeline or for measurements.

    Args:
        blocks: Modules on their device, in training mode.
        keeps: What each block stores between its passes.
        first_block: Index of the first block in the model. A block's random numbers derive from the seed and its index.
        weights: Which weights backward passes differentiate.
        k: Microbatches per update.
        seed: Seed of the random numbers that the blocks draw; another one in each replica.
        numerics: Number formats and memory layouts.
        grid: Grid for exact streams; None for a new one in float32, if ``numerics`` asks for them.
        overwritten: Whether updates may overwrite weights that stored graphs refer to.
        returns_input: As for :class:`petra.engine.stage.Stage`.
        outputs: Specs of the stage's output, if it may have side tensors.
        fetch: As for :func:`petra.engine.block.block_runner`.
    """
    runners = []
    grid = Grid() if numerics.exact_streams and grid is None else grid
    for b, (block, keep) in enumerate(zip(blocks, keeps, strict=True), first_block):
        function, keeps_graph = BlockFunction(block, derive_seed(seed, b)), keep is Keep.GRAPH
        function.around = _around(block, numerics, grid, overwritten=overwritten and keeps_graph)
        versions = WeightVersions(function.parameters, weights, keeps_graph=keeps_graph, k=k)
        runner = block_runner(function, keep, versions, first=b == 0, fetch=fetch)
        if overwritten and keeps_graph and numerics.autocast is not None:
            from petra.engine.options.stored_graphs import FollowUpdates

            runner = FollowUpdates(function, versions, first=b == 0)
        if keep is Keep.INPUT and numerics.stored_format is not None and b:  # the first block may read its input again
            from petra.engine.options.stored_format import FormattedInputs

            runner = FormattedInputs(runner, numerics.stored_format)
        runners.append(runner)
    if keeps[-1] is Keep.NOTHING and any(map(is_side, outputs)):
        from petra.engine.options.side_tensors import KeepSideTensors

        runners[-1] = KeepSideTensors(runners[-1])
    return Stage(runners, Accumulation(nn.ModuleList(blocks), k), returns_input=returns_input, channels_last=numerics.channels_last)


def _grid(plan: Plan, device: torch.device) -> Grid | None:
    """Return a new grid for exact streams, if the plan asks for them."""
    if not plan.numerics.exact_streams:
        return None
    from petra.engine.options.exact_streams import grid_of

    return grid_of(plan, device)


def _around(block: nn.Module, numerics: Numerics, grid: Grid | None, *, overwritten: bool) -> list[Around]:
    """Return what changes how a block is evaluated, from the inside out."""
    around: list[Around] = []
    if numerics.autocast is not None:
        from petra.engine.options.autocast import Autocast

        around.append(Autocast(numerics.autocast))
    if grid is not None:
        from petra.engine.options.exact_streams import OnGrid

        around.append(OnGrid(block, grid))
    if overwritten:
        from petra.engine.options.stored_graphs import ForbidRecomputation

        around.append(ForbidRecomputation(block))
    return around


def build_workers(
    plan: Plan, recipe: Recipe, stages: Mapping[int, Stage], ports: Mapping[int, tuple[Port, Port]], device: torch.device
) -> dict[int, Worker]:
    """Build a worker for each stage of a rank, by index."""
    workers = {}
    for j, stage in stages.items():
        update, (upstream, downstream) = _update(plan, recipe, j, stage, device), ports[j]
        # A later stage of this rank would have failed before, at its update after the same microbatch.
        if j + 1 not in stages or recipe.rules.loss_scale is not None:
            downstream = CheckedPort(downstream, update[FiniteCheck])
        for extension in recipe.extensions:
            upstream = extension.wrap_port(upstream, plan, j)
        if recipe.rules.loss_scale is not None:
            from petra.engine.options.loss_scale import LossScale, ScaledCheck, ScaledPort, ScalingPort

            scale = update[LossScale]
            upstream, downstream = ScaledPort(upstream, scale, update[ScaledCheck]), ScalingPort(downstream, scale)
        if device.type == "cuda" and j == min(stages):
            from petra.engine.options.rounds import paced

            upstream, downstream = paced(upstream, downstream)
        workers[j] = Worker(j, stage, upstream, downstream, update)
    return workers


def _update(plan: Plan, recipe: Recipe, j: int, stage: Stage, device: torch.device) -> Update:
    """Return the updates of a stage: norm, clip, check, scaling, extensions, step, average."""
    rules, rate, extending, averages = recipe.rules, recipe.learning_rate, list[Part](), list[Part]()
    optimizer = _optimizer(recipe, stage.module, plan.k)
    if rules.weights == "bf16":
        from petra.engine.options.bf16_weights import attach_masters

        averages += attach_masters(stage, optimizer)
    for extension in recipe.extensions:
        rate = extension.learning_rate(rate, plan.stages[j].staleness)
        if optimizer is not None:
            extension.prepare(optimizer)
            extending += extension.parts(stage, optimizer, plan, j)
    known = type(optimizer).__module__.startswith(("torch.optim.", "petra."))
    if optimizer is not None and (not known or "zero_grad" in vars(optimizer)):
        from petra.engine.options.optimizer_state import OptimizerNumbers

        extending.append(OptimizerNumbers(stage, optimizer, rules, extending, derive_seed(recipe.seed, -2, j)))
    if optimizer is not None:
        averages += [part for each in recipe.extensions for part in each.parts_after_step(stage, plan, j, extending)]
    clip, last = [] if rules.clip is None else [Clip(rules.clip)], j == len(plan.stages) - 1
    checked: list[Part] = [*clip, FiniteCheck(stage, j + 1, rules, device, last=last)]
    if rules.loss_scale is not None:
        from petra.engine.options.loss_scale import LossScale, ScaledCheck

        scale = LossScale(rules.loss_scale, device)
        checked = [scale, *clip, ScaledCheck(scale, stage, j + 1, rules, device, last=last)]
    if clip or rules.loss_scale is not None:
        checked.append(ScaleGradients(stage.gradients.parameters))
    if rules.average is not None:
        from petra.engine.options.averaging import WeightAverage

        averages.append(WeightAverage(stage.gradients.parameters, rules.average))
    parts = [GradientNorm(stage.gradients.parameters), *checked, *extending, OptimizerStep(stage, optimizer, rate), *averages]
    if rules.clip_globally:
        from petra.engine.options.global_clip import PostponedUpdate

        return PostponedUpdate(parts, device)
    return Update(parts, device)


def when_completed(
    plan: Plan, recipe: Recipe, workers: Mapping[int, Worker], device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[int], None] | None:
    """Return what a rank does after each microbatch that all stages of a replica, whose ranks are ``group``, have done."""
    if not recipe.rules.clip_globally:
        return None
    from petra.engine.options.global_clip import GlobalClip

    act: Callable[[int], None] = GlobalClip(plan, workers.values(), device, group)
    for extension in recipe.extensions:
        act = extension.when_completed(act, plan, workers)
    return act


@contextmanager
def _building(name: str, expected: str, kind: type[PetraError] = ConfigError) -> Iterator[None]:
    """Refuse what a user's function raises that builds a part of the pipeline."""
    try:
        yield
    except PetraError:
        raise
    except Exception as error:
        raise invalid(name, expected, f"{type(error).__name__} ({first_line(error)})", kind) from error


def _optimizer(recipe: Recipe, module: nn.Module, k: int) -> torch.optim.Optimizer | None:
    """Build the optimizer of a stage; None if the stage has no trained parameters.

    Raises:
        ConfigError: If building it fails, if its step needs arguments or sparse gradients, if it would not train because no one
            sets a learning rate, or if a learning rate for all parameter groups would replace different ones.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return None
    with _building("optimizer", "a function that returns a stage's optimizer, given the module of its blocks"):
        optimizer = recipe.optimizer(module)
    name, step = type(optimizer).__name__, getattr(optimizer, "step", None)
    fits = callable(step) and hasattr(optimizer, "param_groups")
    require(fits, "optimizer", "a function that returns a torch.optim.Optimizer", f"one that returns {name}")
    require(hasattr(optimizer, "state"), "optimizer", "one whose state is a dictionary by parameter, for checkpoints", name)
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    require(not scheduled, "optimizer", "one without a scheduler (learning_rate takes a function of the microbatches)", name)
    arguments = signature(optimizer.step).parameters.values()
    needed = [a for a in arguments if a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    require(not needed, "optimizer", "one whose step needs no closure, since passes of other microbatches are in flight", name)
    require(name != "SparseAdam", "optimizer", "one for dense gradients, in which petra accumulates", name)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained, every = ({id(p) for p in module.parameters() if p.requires_grad or frozen} for frozen in (False, True))
    require(trained <= owned <= every, "optimizer", "one of all parameters of its stage, and no others", f"others in {name}")
    if recipe.learning_rate is None:
        expected = "a function, as the optimizer has no learning rate of its own"
        require(not getattr(optimizer, "needs_learning_rate", False), "learning_rate", expected, None)
    else:
        with _building("learning_rate", "a function of the microbatches done"):
            signature(recipe.learning_rate).bind(1)
        found = list[str]()
        with suppress(Exception):  # a table may know later microbatches only
            found = [repr(recipe.learning_rate(k)) for _ in range(2)]
        expected = "the same number at each call, as each stage makes one"
        require(len({*found}) < 2, f"learning_rate({k})", expected, " and then ".join(found))
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        expected = f"None for an optimizer whose parameter groups have the learning rates {', '.join(map(str, rates))}"
        require(len(rates) == 1, "learning_rate", expected, "a function, which sets one learning rate for all groups")
        for group in optimizer.param_groups:  # a tensor is filled: stages and groups may have been given the same one
            group["lr"] = deepcopy(group["lr"])
    return optimizer


def _block(plan: Plan, recipe: Recipe, runtime: Runtime, device: torch.device, b: int) -> nn.Module:
    # Convert each block to its final memory format at once, so that the next block can reuse the freed memory.
    with _building(f"block {plan.model.blocks[b].name}", "a function that builds it", ModelError):
        block = plan.model.build_block(b, recipe.seed).to(device)
    if plan.numerics.channels_last:
        block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if runtime.compile is not None:
        from petra.engine.options.compile import compile_block

        compile_block(block, runtime.compile)
    return block
