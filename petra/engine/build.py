"""Build one rank's part of a pipeline from a plan: stages, their updates, and the workers that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.engine.block import Fetch
from petra.engine.compile import compile_block
from petra.engine.data_parallel import replica_seed
from petra.engine.endpoints import Losses
from petra.engine.graphs import Pools
from petra.engine.metrics import Metric
from petra.engine.stage import Stage
from petra.engine.update import OptimizerFactory, Update
from petra.engine.update_rules import UpdateRules
from petra.engine.worker import Worker
from petra.errors import ModelError, require
from petra.hooks import Hooks
from petra.model import Model
from petra.plan import Plan
from petra.plan.messages import returns_activations
from petra.plan.overlap import overlapped_stages
from petra.reversible import Grid
from petra.settings import Runtime
from petra.staleness import Remedy, StageRemedy
from petra.staleness.shrinking import boundary_factor
from petra.transport import Port


@dataclass(frozen=True)
class Recipe:
    """Training settings of a pipeline, the counterpart of its plan.

    Attributes:
        optimizer: Builds the optimizer of a stage from its blocks.
        learning_rate: Maps the number of microbatches done to a learning rate; None keeps the optimizer's own.
        losses: Losses of training and of evaluation.
        metrics: Metrics by name, each a sum over targets.
        seed: Seed of the weights and of the random numbers that blocks draw.
        rules: Clipping, moving averages and loss scale of the updates.
        remedy: Remedies for stale gradients.
    """

    optimizer: OptimizerFactory
    learning_rate: Callable[[int], float] | None
    losses: Losses
    metrics: Mapping[str, Metric]
    seed: int
    rules: UpdateRules
    remedy: Remedy

    def check(self, plan: Plan) -> None:
        """Check that the method of a plan allows the remedy and the update rules.

        Raises:
            ConfigError: If it does not allow one of them.
        """
        self.remedy.check(plan.method)
        self.rules.check(plan.method, plan.delays)
        scaled = self.rules.loss_scale is not None and self.remedy.delay_compensation > 0
        require(not scaled, "remedy.delay_compensation", "0 with a loss scale (fp16)", self.remedy.delay_compensation)

    def settings(self) -> dict[str, object]:
        """Return the settings that all ranks must agree on, by name."""
        return {"remedy": self.remedy, "rules": self.rules, "seed": self.seed}


def build_stages(
    plan: Plan,
    recipe: Recipe,
    runtime: Runtime,
    device: torch.device,
    place: tuple[int, int],
    hooks: Hooks,
    make_block: Callable[[int], nn.Module] | None = None,
    fetch: Fetch | None = None,
) -> dict[int, Stage]:
    """Build the stages of a rank, by index. Weights depend on the seed and the block only, not on the partition.

    Args:
        place: Index of the rank's replica, and of its process in the replica.
        make_block: Returns a block on its device, given its index. By default, blocks are built for this run.
        fetch: Returns the inputs of a microbatch again, on the device; for plans that refetch.
    """
    make_block = partial(_block, plan, recipe, runtime, device) if make_block is None else make_block
    replica, process = place
    stages = {}
    beside = runtime.overlap and device.type == "cpu"
    for j in plan.layout.processes[process]:
        stage = plan.stages[j]
        stages[j] = Stage(
            [make_block(b) for b in stage.blocks],
            stage.keeps,
            weights=stage.weights,
            first_block=stage.blocks.start,
            k=plan.k,
            seed=replica_seed(recipe.seed, replica),
            autocast=plan.numerics.autocast,
            stale=stage.staleness > 0,
            returns_input=j > 0 and returns_activations(plan.stages[j - 1].keeps[-1]),
            channels_last=plan.numerics.channels_last,
            beside=beside and j in overlapped_stages(plan.boundary_delays),
            pools=Pools.create() if runtime.cuda_graphs else None,
            grid=build_grid(plan, device),
            index=j,
            hooks=hooks,
            split=stage.split,
            fetch=fetch,
            cast_once=_may_cast_once(runtime, device),
            delay_compensation=recipe.remedy.delay_compensation,
        )
    return stages


def _may_cast_once(runtime: Runtime, device: torch.device) -> bool:
    """Return whether F and B may use the same casts of weights. Compiled blocks fuse casts, and CUDA graphs replay them.

    With overlap on a GPU, the stream of F would read what the stream of B writes.
    """
    return runtime.compile is None and not runtime.cuda_graphs and not (runtime.overlap and device.type == "cuda")


def build_grid(plan: Plan, device: torch.device) -> Grid | None:
    """Build the grid for exact streams, in the dtype of the plan's streams; None if streams are not exact."""
    if not plan.numerics.exact_streams:
        return None
    pairs = [profile.outputs for profile in plan.layout.profiles if profile.reversible]
    return Grid(pairs[0][0].dtype if pairs else torch.float32, device)


def check_drained(plan: Plan, workers: Mapping[int, Worker], device: torch.device) -> None:
    """Check the values of a drained pipeline: exact streams and non-finite numbers. Every rank must call this function.

    Raises:
        ModelError: If exact streams exceeded the range of the grid at a stage. Raised on every rank.
        NumericsError: If a value is non-finite and the update rules say stop.
    """
    if (grid := build_grid(plan, device)) is not None:
        own = [worker.stage.grid.largest for worker in workers.values() if worker.stage.grid]
        grid.largest = torch.stack([grid.largest, *own]).amax()
        if dist.is_initialized():
            dist.all_reduce(grid.largest, dist.ReduceOp.MAX)
        grid.require()
    for worker in reversed([*workers.values()]):  # check later stages first: gradients flow upstream
        worker.update.check_drained()


def build_workers(
    plan: Plan,
    recipe: Recipe,
    stages: Mapping[int, Stage],
    ports: Mapping[int, tuple[Port, Port]],
    device: torch.device,
    hooks: Hooks,
    update: type[Update] = Update,
) -> dict[int, Worker]:
    """Build a worker for each stage of a rank, by index. ``update`` is the class of their updates."""
    workers = {}
    for j, stage in stages.items():
        planned = plan.stages[j]
        updates = update(
            stage,
            _optimizer(recipe, stage.module),
            recipe.remedy.learning_rate(recipe.learning_rate, planned.staleness),
            recipe.rules,
            device=device,
            number=j + 1,
            last=j == len(plan.stages) - 1,
            hooks=hooks,
        )
        shrink = boundary_factor(recipe.remedy.shrink, plan.delays, j)
        workers[j] = Worker(j, stage, *ports[j], updates, hooks, shrink, planned.lag)
    return workers


def build_remedies(plan: Plan, recipe: Recipe, workers: Mapping[int, Worker]) -> dict[int, StageRemedy]:
    """Attach remedies to the optimizers of a rank's stages. Return the attached ones by stage index; many stages need none."""
    remedies = {}
    for j, worker in workers.items():
        optimizer = worker.update.optimizer
        if optimizer is not None:
            until_first = 0.0 if plan.method.flush else (plan.delays[0] - plan.delays[j]) / (2 * plan.k)
            remedy = recipe.remedy.attach(worker.stage.use_weights, optimizer, plan.stages[j].staleness, until_first)
            if remedy is not None:
                remedies[j] = remedy
    return remedies


def load_blocks(model: Model, own: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
    """Load parameters and buffers into blocks.

    Args:
        model: The model.
        own: Blocks to load into, by name.
        state: Tensors by ``<block>.<name>``. Entries of other blocks of the model are ignored.

    Raises:
        ModelError: If a key belongs to no block of the model, or an entry of a block is missing or has another shape.
    """
    parts: dict[str, dict[str, Tensor]] = {block.name: {} for block in model.blocks}
    for key, value in state.items():
        block, _, name = key.partition(".")
        if block not in parts:
            raise ModelError(f"contains {key}, but {model.name} has no such block")
        parts[block][name] = value
    for block, module in own.items():
        try:
            module.load_state_dict(parts[block])
        except RuntimeError as error:
            raise ModelError(f"block {block} does not fit ({' '.join(str(error).split())})") from error


def _optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer | None:
    """Build the optimizer of a stage; None if the stage has no trained parameters.

    Raises:
        ConfigError: If it would not train because no one sets a learning rate, or if a learning rate for all parameter groups
            would replace different ones.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return None
    optimizer = recipe.optimizer(module)
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    if recipe.learning_rate is None:
        expected = "a function, as the optimizer has no learning rate of its own"
        require(not getattr(optimizer, "needs_learning_rate", False), "learning_rate", expected, None)
    else:
        expected = f"None for an optimizer whose parameter groups have the learning rates {', '.join(map(str, rates))}"
        require(len(rates) == 1, "learning_rate", expected, "a function, which sets one learning rate for all groups")
    return optimizer


def _block(plan: Plan, recipe: Recipe, runtime: Runtime, device: torch.device, b: int) -> nn.Module:
    # Convert each block to its final memory format at once, so that the next block can reuse the freed memory.
    block = plan.model.build_block(b, recipe.seed).to(device)
    if plan.numerics.channels_last:
        block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if runtime.compile is not None:
        compile_block(block, runtime.compile)
    return block
