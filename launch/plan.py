"""Predict what every method would do with a model on given machines, and recommend a setting. Nothing is trained or allocated.

Two of many devices, with the model, the data and k of a configuration::

    petra plan --devices 16 --teraflops 60 --bandwidth 25 --latency 10 --memory 80 model=revnet50 data=imagenet k=8
    petra plan --machines machines.yaml model=revgpt model.dim=8192 model.depth=80 data=text

Costs are counted: a device computes ``--teraflops`` on average. With ``--measure``, each block is measured on this machine instead.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from petra.cost_model.autotune import Tuned, search_within, tune
from petra.cost_model.costs import BlockCost, count_blocks, profile_blocks
from petra.cost_model.event_graph import PREDICTED, ZB_H1
from petra.cost_model.keeps import BlockMemory, tune_keeps
from petra.cost_model.machines import Link, Machines
from petra.cost_model.memory import PredictedMemory
from petra.cost_model.replicas import seconds_per_update, sum_bytes
from petra.cost_model.simulator import Prediction, predict
from petra.cost_model.stage_memory import Known
from petra.errors import ConfigError, PetraError, require, within
from petra.method import METHODS, Keep, Method
from petra.plan.transport import choose_transport, simulated_transport
from petra.settings import TransportName
from petra.training import limited

from .config.catalogue import configurations
from .config.compose import compose_overrides
from .config.machines import LATENCY, SCALE, read_machines
from .config.schema import AUTO, Config
from .config.words import as_word
from .run.build import Setup, set_numerics, set_up
from .run.costs import MEMORY_PARTS, block_memories, show_progress, stage_memories
from .run.expected import PAGE, TASKS, Expected, expected, in_range, setting_of, shown
from .run.folder import as_data, flat
from .run.targets import optimizer_factory
from .runtime.rank import Process
from .runtime.terminal import command, parser_for, path_argument, table

HEADER = ("method", "d", "samples/s", "bubble", "staleness", "loss above exact", "GB per device", "MB per microbatch", "link use")
COLUMNS = "bubble: mean over stages; staleness, GB, link use: largest; MB: all boundaries in both directions, of one replica"
"""What the columns are of."""
EXACT_ENOUGH = 0.95
"""A method with exact gradients is recommended alone if it reaches this fraction of the highest throughput."""
COMPARED = ("delayed", "reconstruct_stashed", "pipedream", "pipedream_2bw", "gpipe")
"""Methods that are never recommended: they exist for comparison (docs/methods.md)."""
UNKNOWN = "not known here"
REASONS = {True: "by throughput, late gradients", False: "by throughput, exact gradients"}
"""Reasons for a recommendation, for late gradients and others, where it is not known what staleness costs."""
NOT_TRAINED = f"{ZB_H1.name} is only predicted, without its memory: petra does not train with it"
KEEP_AUTO = replace(METHODS["petra"], name="petra, method.keep=auto")
"""Stands for PETRA whose blocks store what is fastest within the memory of the devices."""
AUTO_DELAY = replace(METHODS["petra"], name="petra, d=auto")
"""Stands for PETRA with the smallest delays that keep the throughput."""
DEFAULTS = {"devices": 4, "teraflops": 50.0, "memory": float("inf"), "bandwidth": 10.0, "latency": 10.0}
"""Values of flags that are not given. A file of machines replaces all but ``--teraflops``."""
RECOMPUTED = replace(METHODS["1f1b"], name="1f1b, method.keep=input", keep=Keep.INPUT)
"""1F1B with recomputation, which has exact gradients where the graphs of others don't fit."""


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the table, the methods that do not fit, and the recommendation."""
    parser = parser_for(__doc__, "All other arguments are those of petra train, such as model=revnet50 data=imagenet k=8.")
    parser.add_argument("--devices", type=int, help="number of devices (default: 4)")
    parser.add_argument("--teraflops", type=float, help="mean speed of a device in TFLOP/s (default: 50)")
    parser.add_argument("--memory", type=float, help="memory of a device in GB (default: no limit)")
    parser.add_argument("--bandwidth", type=float, help="bandwidth of a link in GB/s (default: 10)")
    parser.add_argument("--latency", type=float, help="latency of a link in microseconds (default: 10)")
    parser.add_argument("--per-machine", type=int, default=8, help="devices of a machine, for the command to train (default: 8)")
    parser.add_argument("--machines", type=path_argument, help="file of devices and links instead, as for cluster.machines")
    parser.add_argument("--measure", action="store_true", help="measure the blocks on this machine instead of counting FLOPs")
    options, overrides = parser.parse_known_args(arguments)
    text, recommended = report(compose_overrides(overrides), options, overrides)
    print(text)
    if not recommended:
        raise ConfigError(
            "--devices, --memory: expected devices that one of the recommended methods fits, got none (reasons above)"
        )


@dataclass(frozen=True)
class Candidate:
    """A method with its partition and delays on the given machines.

    Attributes:
        method: The method with the chosen delays.
        tuned: Partition and costs of the stages.
        prediction: Steady state.
        traffic: Bytes that cross all boundaries per microbatch.
        link_use: Fraction of the period in which the busiest direction of a link transfers.
        memory: Memory of each device; empty if it is not predicted.
        limit: Memory in bytes within which a run may choose what to store: that of the largest device, since the run knows what the
            others have; of the smallest if some devices are not used, which the file of a run can't have.
        expected: What staleness costs in a benchmark of such runs; None if that is not known.
    """

    method: Method
    tuned: Tuned
    prediction: Prediction
    traffic: int
    link_use: float
    memory: Sequence[PredictedMemory]
    limit: float
    expected: Expected | None = None

    @property
    def recommendable(self) -> bool:
        """Whether petra trains with the method, and not for comparison only."""
        return bool(self.memory) and self.method.name.split(", ")[0] not in COMPARED

    @property
    def staleness(self) -> float:
        """Largest mean number of updates between forward and backward of a microbatch."""
        return max(self.prediction.staleness)

    def cells(self, samples: int, task: str | None) -> tuple[str, ...]:
        """Return the row of the table, for ``samples`` in a microbatch and a task of a benchmark."""
        above = UNKNOWN if self.expected is None or task is None else shown(self.expected, task)
        delay, bubble = self.method.delay, self.prediction.bubble
        delays = [] if self.method.fill else [delay] if isinstance(delay, int) else delay
        return (
            self.method.name,
            "–".join(map(str, sorted({min(delays), max(delays)}))) if delays else "–",
            plain(samples / self.prediction.period),
            f"{sum(bubble) / len(bubble):.0%}",
            f"{self.staleness:.3g}",
            above if self.staleness else "0",
            f"{max(found.total for found in self.memory) / 1e9:.3g}" if self.memory else "–",
            plain(self.traffic / 1e6),
            f"{self.link_use:.0%}",
        )

    def setting(self, others: Sequence[str]) -> list[str]:
        """Return the overrides that select the method, its partition and its delays after ``others``, which may have an experiment.

        They have each key whose value would be another one without them.
        """
        name, tuned, own = self.method.name.split(", ")[0], self.tuned, vars(self.method)
        group = [f"method={name}"] if name in configurations("method") else []
        with redirect_stdout(None):  # what is left out of an experiment was printed before
            found = dict(flat(as_data(compose_overrides([*others, *group]))))
        automatic, limited = tuned.keep is not None, self.limit < float("inf")
        wanted: dict[str, object] = {
            "method.keep": own["keep"] if tuned.keep is None else AUTO if limited else tuned.keep,
            "trainer.memory_limit": float(f"{self.limit / 1e9:g}") if automatic and limited else None,
            "trainer.stages": None if {*tuned.stages} == {1} else tuned.stages,  # each block is a stage
            **{f"method.{key}": value for key, value in own.items() if key != "keep"},
            "method.name": name,
        }
        if self.method.delay == () and not isinstance(found["method.delay"], list):  # a single stage has no boundary
            del wanted["method.delay"]
        plain = {key: [*value] if isinstance(value, tuple) else value for key, value in wanted.items() if key in found}
        return [*group, *(f"{key}={as_word(value)}" for key, value in plain.items() if value != found[key])]


def predict_method(
    blocks: Sequence[BlockCost],
    method: Method,
    k: int,
    machines: Machines,
    transport: TransportName,
    *,
    memories: Callable[[Method, Tuned], list[PredictedMemory]] | None = None,
    tune_delay: bool = False,
    stored: Sequence[BlockMemory] | None = None,
    sums: Callable[[Tuned, float], list[float]] | None = None,
) -> Candidate:
    """Partition the blocks over the machines for a method, and predict its steady state.

    Args:
        memories: Predicts the memory of each stage. Without it, the memory of the devices is no limit.
        stored: Bytes of each block, if what it stores is to be chosen. Needs ``memories``.
        sums: Seconds that an update of each stage waits for sums over replicas, given the period without them.

    Raises:
        ConfigError: If no partition fits the memory of the devices, or if the method does not fit k.
    """
    count = min(len(machines.devices), len(blocks))
    links, devices = machines.connections[: count - 1], machines.devices[:count]
    own = memories and partial(memories, method)
    rules: dict[str, Any] = {"tune_delay": tune_delay, "link": links, "transport": transport}
    if stored is not None and own is not None:
        tuned, memory = tune_keeps(blocks, stored, method, k, count, devices, own, "memory", **rules)
    else:
        tuned, memory = search_within(devices, partial(tune, blocks, method, k, count, **rules), own, "memory", "device")
    method = replace(method, delay=tuned.delay)
    network: dict[str, Any] = {"link": links, "transport": simulated_transport(transport, method.boundary_delays(count - 1))}
    found = predict(tuned.costs, method, k, **network)
    if sums is not None:
        waits = zip(tuned.costs, sums(tuned, found.period), strict=True)
        found = predict([replace(cost, update=cost.update + wait) for cost, wait in waits], method, k, **network)
    messages = [(cost.forward_bytes, link.forward) for cost, link in zip(tuned.costs, links, strict=False)]
    messages += [(cost.backward_bytes, link.backward) for cost, link in zip(tuned.costs[1:], links, strict=True)]
    busiest = max((size / link.bandwidth for size, link in messages), default=0.0)
    return Candidate(
        method,
        tuned,
        found,
        sum(size for size, _ in messages),
        busiest / found.period,
        memory,
        (max if count == len(machines.devices) else min)(device.memory for device in devices),
    )


def recommend(rows: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return the recommended methods by the reason, without those for comparison.

    Where it is known what staleness costs, it is the method with the least time until a training loss that all reach. Otherwise, it
    is the fastest of each kind, with exact gradients and with late ones, and the least stale of those that are nearly as fast.
    Only the exact one, if it is nearly as fast as the other.
    """
    rows = [row for row in rows if row.recommendable]
    times = {
        id(row): row.prediction.period * row.expected.updates for row in rows if row.expected is not None and row.expected.updates
    }
    known = [row for row in rows if id(row) in times]
    if any(row.staleness for row in known):
        best = min(known, key=lambda row: times[id(row)])
        exact = min((times[id(row)] for row in known if not row.staleness), default=0.0)
        gain = f" ({times[id(best)] / exact:.0%} of that with exact gradients)" if exact and best.staleness else ""
        return {f"by time to a training loss{gain}": best}
    found: dict[str, Candidate] = {}
    for late_ones, reason in REASONS.items():
        own = [row for row in rows if bool(row.staleness) == late_ones]
        fastest = min((row.prediction.period for row in own), default=0.0)
        close = [row for row in own if row.prediction.period * EXACT_ENOUGH <= fastest]
        if close:
            found[reason] = min(close, key=lambda row: (row.staleness, row.prediction.period))
    late, exact_one = map(found.get, REASONS.values())
    if late is not None and exact_one is not None and exact_one.prediction.period * EXACT_ENOUGH <= late.prediction.period:
        del found[REASONS[True]]
    return found


def report(config: Config, options: argparse.Namespace, overrides: Sequence[str] = ()) -> tuple[str, bool]:
    """Return the report in Markdown, and whether it recommends a method.

    Args:
        overrides: What ``config`` was composed of, for the command that trains as recommended.
    """
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        expected = f"{AUTO} or null, since petra plan chooses the stages of --devices processes"
        require(key != "trainer.stages" or value in (AUTO, "null"), key, expected, value)
    # This one process accepts no transport between processes.
    alone = set_up(replace(config, trainer=replace(config.trainer, transport=AUTO)), Process(0, config.dp, 0, 1))
    setup, machines = replace(alone, config=config), _machines(options, config)
    link = _link_of_replicas(options, config, machines) if config.dp > 1 else None
    samples, count = setup.plan.inputs.shape[0], min(len(machines.devices), len(setup.plan.layout.profiles))
    try:
        choose_transport(config.trainer.transport, count, (), world=count * config.dp)
    except ConfigError as error:  # names the argument
        raise ConfigError(f"trainer.{error}") from error
    rows, refused = candidates(setup, machines, link, measure=options.measure, teraflops=options.teraflops)
    rows, task = with_expected(setup, rows)
    name = next((word.removeprefix("model=") for word in reversed(overrides) if word.startswith("model=")), setup.plan.model.name)
    lines = [
        f"{name}: {len(setup.plan.layout.profiles)} blocks, {setup.plan.parameters / 1e9:.3g} billion parameters; "
        f"microbatches of {setup.plan.inputs}, k = {config.k}, {count} of {len(machines.devices)} devices"
        f"{f' in each of {config.dp} replicas' if config.dp > 1 else ''}",
        _assumptions(options, config, setup),
        "",
    ]
    if rows:
        lines.append(table(HEADER, [row.cells(samples, task) for row in rows], aligned=True))
        lines.append(COLUMNS)
        lines += [_shown_sums(setup, rows[0], link)] if config.dp > 1 else []
        lines += [NOT_TRAINED] * any(not row.memory for row in rows)
        lines += [] if task is None else [f"loss above exact: measured on {TASKS[task].what} ({PAGE})"]
    chosen = recommend(rows)
    for reason, best in chosen.items():
        plan = alone.with_choice(best.tuned.stages, best.tuned.delay, best.method, best.tuned.keep).plan
        unused = ["trainer.stored_format="] * (plan.numerics.stored_format is None)
        own = ("method=", "method.", "trainer.stages=", "trainer.memory_limit=", *unused)
        others = [word for word in overrides if not word.lstrip("+~").startswith(own)]
        words = best.setting(others)
        described = count == len(machines.devices) and options.machines and not config.cluster.machines
        if described and f"method.keep={AUTO}" in words:
            words.append(f"cluster.machines={as_word(options.machines)}")  # within the memory of each device
        lines += [f"recommended: {' '.join(words)}", f"chosen {reason}"]
        lines.append(_command([*others, *words], count * config.dp, options.per_machine))
        device = max(range(count), key=lambda j: best.memory[j].total)
        parts = (f"{part} {getattr(best.memory[device], part) / 1e9:.3g}" for part in MEMORY_PARTS)
        lines.append(f"memory of its fullest device, {device + 1}, in GB: {', '.join(parts)}")
    return "\n".join([*lines, *(["", "not possible:", *refused] if refused else [])]), bool(chosen)


def candidates(
    setup: Setup, machines: Machines, link: Link | None, *, measure: bool, teraflops: float
) -> tuple[list[Candidate], list[str]]:
    """Return all methods that are possible, the fastest first, and lines about the others.

    Args:
        link: Link between replicas. None: there are none, or their sums are not counted.
        measure: Measure the blocks on this machine.
        teraflops: Speed of a device, if not measured.
    """
    config, plan = setup.config, setup.plan
    if measure:
        set_numerics(config.trainer)
        optimizer = optimizer_factory(config.optim)
        rules: dict[str, Any] = {"device": setup.device, "numerics": plan.numerics, "compile": config.trainer.compile}
        blocks = profile_blocks(plan.model, plan.layout.inputs, optimizer=optimizer, **rules)
    else:
        blocks = tuple(block.scaled(1e-12 / teraflops) for block in count_blocks(plan.model, plan.layout.inputs, plan.numerics))
    on_gpus, transport = config.trainer.device != "cpu", config.trainer.transport
    count = min(len(machines.devices), len(blocks))
    if transport == AUTO and count > 1:  # delays matter only where auto may select edge
        chosen = choose_transport(AUTO, count, (1,), "cuda" if on_gpus else "cpu", count * config.dp)
        transport = AUTO if chosen == "edge" else chosen
    known, rows, refused = Known(), list[Candidate](), list[str]()
    predicted = partial(stage_memories, setup, known, device_type="cuda" if on_gpus else setup.device.type)
    sums = None if link is None else partial(_waits, setup, link)
    usual, methods = METHODS.get(config.method.name, METHODS["petra"]), [*PREDICTED.values(), RECOMPUTED, KEEP_AUTO, AUTO_DELAY]
    given = {"keep": config.method.keep, "delay": config.method.delay, **config.method.options}
    present = (AUTO,) if usual is METHODS["petra"] else ()  # petra has rows with automatic keys in any case
    changed = [f"method.{k}={v}".replace(" ", "") for k, v in given.items() if v not in (*present, getattr(usual, k, v))]
    name = ", ".join([config.method.name, *changed])
    own = replace(plan.method, name=name) if changed and name != RECOMPUTED.name else None
    methods += [own] if own is not None else []
    for done, method in enumerate(methods, 1):
        show_progress(f"{method.name}: method {done} of {len(methods)}")
        memories = None if method is ZB_H1 else predicted
        tune_delay = method in (KEEP_AUTO, AUTO_DELAY) or ("delay" in setup.auto and method is own)
        predict_own = partial(predict_method, memories=memories, tune_delay=tune_delay, sums=sums)
        try:
            automatic = method is KEEP_AUTO or ("keep" in setup.auto and method is own)
            stored = block_memories(setup, known, method) if automatic else None
            rows.append(predict_own(blocks, method, config.k, machines, transport, stored=stored))
        except ConfigError as error:
            refused.append(f"- {method.name}: {error}")
    return sorted(rows, key=lambda row: row.prediction.period), refused


def _waits(setup: Setup, link: Link, tuned: Tuned, period: float) -> list[float]:
    """Return the seconds that an update of each stage waits for sums over replicas, given the period without them."""
    dp, shard, update = setup.config.dp, setup.config.optim.rules.shard, setup.plan.k * period
    return [seconds_per_update(size, dp, link, setup.outer, update, shard) for size in _parameters(setup, tuned)]


def _parameters(setup: Setup, tuned: Tuned) -> list[int]:
    """Return the number of trained parameters of each stage."""
    profiles = iter(setup.plan.layout.profiles)
    return [sum(profile.trained for profile in islice(profiles, count)) for count in tuned.stages]


def _shown_sums(setup: Setup, row: Candidate, link: Link | None) -> str:
    """Return a line about what replicas send over the link between them."""
    size, outer, dp = max(_parameters(setup, row.tuned)), setup.outer, setup.config.dp
    when = f"at every {outer.every} updates, which may take {outer.overlap} updates" if outer.every else "at every update"
    counted = "" if link is not None else "; not counted, since the file of machines has no link"
    shard = setup.config.optim.rules.shard
    megabytes = plain(sum_bytes(size, dp, outer, shard) / 1e6)
    what = "sums over replicas and new weights" if shard else "a sum over replicas"
    return f"replicas: with {row.method.name}, a stage sends up to {megabytes} MB for {what}, {when}{counted}"


def with_expected(setup: Setup, rows: Sequence[Candidate]) -> tuple[list[Candidate], str | None]:
    """Return the methods with what staleness costs them, and the task of the benchmark; None if it trained no such run."""
    settings = [setting_of(setup, row.method, row.tuned.keep or ()) for row in rows]
    task = next((setting.task for setting in settings if setting is not None), None)
    if task is None or not in_range(TASKS[task].parameters, setup.plan.parameters):
        return [*rows], None
    if not in_range(TASKS[task].samples, _samples(setup)):  # which reads the data
        return [*rows], None
    known = [replace(row, expected=expected(setting, row.staleness)) for row, setting in zip(rows, settings, strict=True)]
    return known, task


def _samples(setup: Setup) -> float | None:
    """Return the targets that the run trains on; None if its data isn't there."""
    config = setup.config
    try:
        train, _ = setup.data()
    except PetraError:
        return None
    batches = limited(train.batches_per_epoch, config.trainer.limit_batches) * config.trainer.epochs
    return float(batches * config.data.batch_size * (config.data.size if setup.unit == "tokens" else 1))


def plain(value: float) -> str:
    """Return a number with four digits, or all before the point."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _command(settings: Sequence[str], processes: int, per_machine: int) -> str:
    """Return the line with the command that trains in a number of processes, of which ``per_machine`` fit on a machine."""
    if processes <= per_machine:
        several = ["--nproc", str(processes)] if processes > 1 else []
        return f"to train: {shlex.join(['petra', 'train', *several, *settings])}"
    *full, last = range(0, processes, per_machine)
    nodes, left = len(full) + 1, processes - last
    counts = ",".join(map(str, [*[per_machine] * len(full), left])) if left < per_machine else per_machine
    variables = f"NNODES={nodes} NODE_RANK=N NPROC_PER_NODE={counts} MASTER_ADDR=ADDRESS"
    return f"to train, on machine N = 0 to {nodes - 1}: {variables} {shlex.join(['petra', 'node', *settings])}"


def _assumptions(options: argparse.Namespace, config: Config, setup: Setup) -> str:
    """Return what the predictions assume of the machines."""
    speed = f"counted FLOPs at {options.teraflops:g} TFLOP/s per device"
    if options.measure:
        speed = f"times of blocks measured on a {setup.device.type.upper()} of this machine"
    links = f"links of {options.bandwidth:g} GB/s and {options.latency:g} µs"
    return f"predicted from {speed}, {options.machines or config.cluster.machines or links}"


def _link_of_replicas(options: argparse.Namespace, config: Config, machines: Machines) -> Link | None:
    """Return the link between replicas: as the first one between stages. None if a file of machines has none."""
    if machines.connections:
        return machines.connections[0].forward
    return None if options.machines or config.cluster.machines else Link(1e9 * options.bandwidth, 1e-6 * options.latency)


def _machines(options: argparse.Namespace, config: Config) -> Machines:
    """Return the devices and links of the file, or of the flags, whose defaults are added to the options.

    Raises:
        ConfigError: If the file or a flag is invalid, or a flag has no effect beside the file or ``--measure``.
    """
    sources = {"--machines": options.machines, "cluster.machines": config.cluster.machines}
    (source, path), *others = [pair for pair in sources.items() if pair[1]] or [("", None)]
    for other, second in others:
        require(Path(second) == Path(path), other, f"nothing, or the file of {source}, {path}", second)
    if (limit := config.trainer.memory_limit) is not None and not path:
        require(options.memory in (None, limit), "--memory", f"nothing, or {limit:g} as trainer.memory_limit", options.memory)
        options.memory = limit
    for name, default in DEFAULTS.items():
        value, instead = getattr(options, name), "--measure" if name == "teraflops" else f"{source}={path}"
        unused = options.measure if name == "teraflops" else bool(path)
        require(value is None or not unused, f"--{name}", f"nothing with {instead}, which replaces it", value)
        setattr(options, name, default if value is None else value)
    for name in ("devices", "per_machine", "memory"):
        most = float("inf") if name == "memory" else 1e6
        expected = "a number > 0" + " and <= 1e6" * (name != "memory")
        require(0 < getattr(options, name) <= most, f"--{name}".replace("_", "-"), expected, getattr(options, name))
    for name, bounds in (("teraflops", SCALE), ("bandwidth", SCALE), ("latency", LATENCY)):
        require(within(getattr(options, name), bounds), f"--{name}", f"a number {bounds}", getattr(options, name))
    if path:
        found, limit = read_machines(path, source), float("inf") if limit is None else 1e9 * limit
        return replace(found, devices=tuple(replace(device, memory=min(device.memory, limit)) for device in found.devices))
    return Machines.equal(options.devices, Link(1e9 * options.bandwidth, 1e-6 * options.latency), 1e9 * options.memory)
