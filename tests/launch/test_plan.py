"""launch.plan, the file of unequal machines, settings chosen automatically, and what they change in the partition."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config.compose import compose_overrides
from launch.config.machines import read_machines, write_machines
from launch.doctor.links import describe, measure_speeds
from launch.doctor.machine import Report
from launch.plan import main
from launch.run import costs
from launch.run.build import Setup, set_up
from launch.run.costs import memory_table, stage_memories, tune_setup
from launch.runtime.rank import Process
from petra import ConfigError, Keep, Model, Numerics, PetraError, TensorSpec
from petra.cost_model.autotune import Tuned
from petra.cost_model.costs import BlockCost, count_blocks
from petra.cost_model.event_graph import PREDICTED
from petra.cost_model.machines import Connection, Device, Link, Machines
from tests.support.commands import ALONE, TINY, lines, planned, refused
from tests.support.forked import Forked

pytestmark = pytest.mark.usefixtures("shared_profiles")

SMALL = ["model=revnet18", "model.width=0.0625", "data=synthetic", "data.batch_size=2"]
FILE = """
devices:
  - {count: 2, memory: 80}
  - {speed: 0.5, memory: 40}
links:
  - {count: 2, forward: {bandwidth: 12, latency: 20}, backward: {bandwidth: 10}}
"""
TWO = "devices: [{}, {}]\nlinks: "


def test_a_file_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(FILE)
    found = read_machines(str(path))
    assert found.devices == (Device(1.0, 80e9), Device(1.0, 80e9), Device(0.5, 40e9))
    assert found.connections == (Connection(Link(12e9, 1e-6 * 20), Link(10e9, 0.0)),) * 2
    again = str(tmp_path / "again.json")
    write_machines(again, found)
    assert read_machines(again).devices == found.devices
    path.write_text("devices: [{speed: 312}, {speed: 156}]\nlinks: [{forward: {bandwidth: 1}, backward: {bandwidth: 1}}]\n")
    assert [device.speed for device in read_machines(str(path)).devices] == [1, 0.5], "relative to the first, whatever the unit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [{speedx: 1}]", "speedx"),
        ("devices: [{speed: 0}]", "speed: expected a number >= 1e-6 and <= 1e6, got 0"),
        (f"{TWO}[{{forward: {{bandwidth: 1, latency: .inf}}, backward: {{bandwidth: 1}}}}]", "latency: expected a number >= 0"),
        ("devices: [{count: 3}]", "links: expected 2, one between each two neighbours of 3 processes, got 0"),
        ("devices: [{memory: 80.0e+9}]", "memory: expected null or a number > 0 and <= 1e6, got 80000000000.0"),
        (f"{TWO}[{{forward: {{bandwidth: 1, latency: 2.0e-5}}, backward: {{bandwidth: 1}}}}]", "latency: expected microseconds"),
        ("devices: [", "YAML"),
        (f"{TWO}[{{forward: {{bandwidth: 1, bandwidth: 2}}, backward: {{bandwidth: 1}}}}]", "found duplicate key bandwidth"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(text)
    error = refused(main, [f"cluster.machines={path}", *SMALL])
    assert error.startswith("cluster.machines: ")
    assert message in error
    with pytest.raises(ConfigError, match="missing"):
        read_machines(str(tmp_path / "missing.yaml"))


def test_machines_that_the_doctor_describes() -> None:
    reports = [Report(rank, f"{rank // 2} (host)", "cpu", 64, 1, {}, {}, ()) for rank in range(4)]
    pair, slow = Connection(Link(5e9, 1e-5), Link(4e9, 1e-5)), Connection(Link(1e9, 1e-3), Link(1e9, 1e-3))
    links = {(0, 1): pair, (2, 3): slow, (0, 2): slow}
    found = describe(reports, links, [2.0, 1.0, 4.0, 4.0], replica_size=2)
    assert found == Machines((Device(1.0, 32), Device(0.5, 32)), (pair,))
    assert measure_speeds(torch.device("cpu"))[0] > 0


def test_plan_prints_all_methods_and_recommends_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "4", *SMALL, "k=8"])
    out = capsys.readouterr().out
    assert out.startswith("revnet18: 10 blocks, ")
    assert all(f"| {name} " in out for name in PREDICTED)
    recommended = re.search(r"recommended: (.*)", out).group(1).split()  # type: ignore[union-attr]
    pasted = shlex.split(re.search(r"to train: (.*)", out).group(1))  # type: ignore[union-attr]
    assert pasted == ["petra", "train", "--nproc", "4", *SMALL, "k=8", *recommended]
    own, chosen = ("method.keep=input", "method.delay=2", "method.max_updates=9"), ("trainer.stages=auto",)
    main(["--devices", "10", *SMALL, "dp=2", "optim.shard=true", *chosen, "method=1f1b", *own])
    replicated = capsys.readouterr().out
    rows = {cells[1].strip(): cells for line in replicated.splitlines() if len(cells := line.split("|")) > 8}
    assert float(rows[", ".join(["1f1b", *own])][7]) < float(rows["1f1b"][7]), "1F1B with recomputation has a row of its own"
    commands = re.findall(
        r"^to train, on machine N = 0 to 2: NNODES=3 NODE_RANK=N NPROC_PER_NODE=8,8,4 .* (petra .*)$", replicated, re.M
    )
    assert commands, "20 processes are on more than one machine, not 24"
    assert all(len(re.findall("method=", line)) == 1 for line in commands), "the command has the recommended method only"
    assert not re.search(r"trainer\.(stages|memory_limit)", replicated), "each block is a stage by default"
    assert all(line.startswith("petra node model=revnet18 ") for line in commands)
    device, parts = re.search(r"fullest device, (\d), in GB: (.*)", out).groups()  # type: ignore[union-attr]
    overrides = [*SMALL, "k=8", *recommended]  # on GPUs, which this machine need not have
    setup = set_up(compose_overrides(overrides), Process(rank=0, world=4, local_rank=0, local_world=4))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in memory_table(setup).splitlines()[2:]]
    assert [row[:2] for row in rows] == [[str(j), str(j + 1)] for j in range(4)]
    totals = [float(row[-1]) / 1e3 for row in rows]
    chosen = dict(override.split("=") for override in recommended)
    auto = ", method.keep=auto" if "method.keep" in chosen else ", d=auto" if "method.delay" in chosen else ""
    (column,) = [float(line.split("|")[7]) for line in out.splitlines() if line.startswith(f"| {chosen['method']}{auto} ")]
    assert totals[int(device) - 1] == max(totals) == pytest.approx(column, rel=0.01)
    assert sum(float(part.split()[1]) for part in parts.split(", ")) == pytest.approx(column, rel=0.01)
    fresh = f"method.keep=[{','.join(['input'] * 10)}]"
    main([*SMALL, "method=petra_fresh", fresh, "remedy=pipemare", "trainer.transport=edge"])
    out = capsys.readouterr().out.replace("'", "")
    assert all(part in out for part in (f"| petra_fresh, {fresh} ", "- paci: remedy.correction: expected 0 unless"))


def test_sums_over_replicas_of_one_device_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    """At every update of k microbatches, a device sends 2 (n − 1) / n of its gradients over the link, also without neighbours."""
    words = [*SMALL, "dp=2", "k=8", "data.batch_size=4"]
    seconds = []
    for bandwidth in (1e-3, 1e6):
        main(["--devices", "1", "--latency", "0", "--bandwidth", str(bandwidth), *words])
        row = next(line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| backprop "))
        seconds.append(4 / float(row[3]))
    parameters = set_up(compose_overrides(words), Process(rank=0, world=2, local_rank=0, local_world=2)).plan.parameters
    assert seconds[0] - seconds[1] == pytest.approx(4 * parameters / 1e6 / 8, rel=1e-2)


@pytest.mark.parametrize("word", ["devices=0", "latency=inf", "teraflops=-1", "teraflops=inf", "bandwidth=1e300", "memory=nan"])
def test_numbers_without_a_prediction_are_refused(word: str) -> None:
    name, value = word.split("=")
    error = refused(main, ["--devices", "2", f"--{word}", *SMALL])
    assert error.startswith(f"--{name}: expected ")
    assert error.endswith(f"got {value if name == 'devices' else float(value)}")


def counted(setup: Setup) -> list[int]:
    """Return the bytes of each stage by the account."""
    method = setup.plan.method
    stages = tuple(len(stage.blocks) for stage in setup.plan.stages)
    return [memory.total for memory in stage_memories(setup, {}, method, Tuned(stages, method.delay, (), ()))]


@pytest.fixture
def counted_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks take times by their FLOPs, so that a busy machine chooses the same settings."""

    def profile(model: Model, inputs: TensorSpec, *, numerics: Numerics, **_: Any) -> tuple[BlockCost, ...]:
        return tuple(block.scaled(1e-12) for block in count_blocks(model, inputs, numerics))

    monkeypatch.setattr("launch.run.costs.profile_blocks", profile)


@pytest.mark.usefixtures("counted_times")
def test_stages_fit_the_memory_limit_by_the_account() -> None:
    settings, two = (*TINY, "trainer.stages=auto"), Process(rank=0, world=2, local_rank=0, local_world=2)
    free = counted(tune_setup(planned(*settings, place=two), ALONE))
    limit = max(free) - 10_000
    tight = tune_setup(planned(*settings, f"trainer.memory_limit={limit / 1e9}", place=two), ALONE)
    assert max(counted(tight)) <= limit < max(free)
    low = 0.3 * max(free) / 1e9
    with pytest.raises(PetraError, match=rf"trainer\.memory_limit: expected at least .* GB for stage \d, got {low:.3g} GB"):
        tune_setup(planned(*settings, f"trainer.memory_limit={low}", place=two), ALONE)


@pytest.mark.usefixtures("counted_times")
def test_the_memory_in_a_file_of_machines_limits_the_stages_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("devices: [{memory: 0.001}]")
    with pytest.raises(PetraError, match=r"trainer\.memory_limit: expected at least .* GB for stage 1, got 0.001 GB"):
        tune_setup(planned(*TINY, "trainer.stages=auto", f"cluster.machines={file}"), ALONE)


@pytest.mark.usefixtures("counted_times")
def test_a_resumed_run_checks_its_limit_and_says_that_machines_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Its settings are those of the checkpoint. The file is not read."""
    settings, two = (*TINY, "trainer.stages=auto"), Process(rank=0, world=2, local_rank=0, local_world=2)
    chosen = tune_setup(planned(*settings, place=two), ALONE).choices
    resumed = tune_setup(planned(*settings, "trainer.memory_limit=9", "cluster.machines=none", place=two), two, chosen)
    assert resumed.choices == chosen
    assert caplog.messages == ["cluster.machines is not used: the run resumes with the settings that were chosen when it started"]
    with pytest.raises(PetraError, match=r"trainer\.memory_limit: expected at least .* for the stages in the checkpoint"):
        tune_setup(planned(*settings, "trainer.memory_limit=0.001", place=two), two, chosen)


@pytest.mark.usefixtures("counted_times")
def test_what_blocks_store_is_chosen_within_the_limit_and_kept_by_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    two = Process(rank=0, world=2, local_rank=0, local_world=2)
    settings = (*TINY, "method.keep=auto", "trainer.stages=auto", "method.delay=1")
    most = max(counted(tune_setup(planned(*settings, "trainer.memory_limit=9", place=two), ALONE)))
    limit = most - 20_000
    found = tune_setup(planned(*settings, f"trainer.memory_limit={limit / 1e9}", place=two), ALONE)
    keep, stages = found.plan.method.keep, [len(stage) for stage in found.plan.layout.stages]
    assert Keep.GRAPH in keep
    assert {*keep} - {Keep.GRAPH}, "not all graphs fit"
    assert max(counted(found)) <= limit < most
    by_hand = f"method.keep=[{','.join(keep)}]", f"trainer.stages={stages}".replace(" ", "")
    same = planned(*TINY, *by_hand, "method.delay=1", place=two).plan
    assert replace(same, model=found.plan.model) == found.plan
    chosen = json.loads(json.dumps(found.choices))
    capsys.readouterr()
    for place in (ALONE, two):
        resumed = tune_setup(planned(*settings, "trainer.memory_limit=9", place=place), place, chosen)
        assert resumed.plan.method.keep == keep
    other = tune_setup(planned(*settings[:-2], "trainer.stages=3", "method.delay=1", "trainer.memory_limit=9"), ALONE, chosen)
    assert (other.plan.method.keep, len(other.plan.stages)) == (keep, 3)
    assert capsys.readouterr().out == "", "nothing was measured"
    with pytest.raises(PetraError, match=r"trainer\.memory_limit: expected at least .* for what blocks store in the checkpoint"):
        tune_setup(planned(*settings, f"trainer.memory_limit={0.9 * limit / 1e9}", place=two), ALONE, chosen)
    with pytest.raises(
        ConfigError, match=r"trainer\.memory_limit: expected a number > 0 with method\.keep=auto on a CPU, got null"
    ):
        planned(*settings)


@pytest.mark.usefixtures("counted_times")
def test_the_free_memory_of_gpus_is_measured_once_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs without ``trainer.memory_limit``: the run resumes with what was free when it started."""

    def on_gpus(free: float, stages: str, chosen: dict[str, Any] | None = None) -> Setup:
        monkeypatch.setattr(costs, "_free_memory", lambda setup: free if "keep" in setup.auto else math.inf)
        setup = planned(*TINY, "method.keep=auto", stages, "method.delay=1", "trainer.memory_limit=1")
        trainer = replace(setup.config.trainer, memory_limit=None)
        return tune_setup(replace(setup, config=replace(setup.config, trainer=trainer)), ALONE, chosen)

    begun = on_gpus(0.04, "trainer.stages=2")
    chosen = json.loads(json.dumps(begun.choices))
    assert chosen["limit"] == 0.04
    assert max(counted(begun)) <= 0.04e9
    for stages in ("trainer.stages=2", "trainer.stages=3"):
        resumed = on_gpus(1e-9, stages, chosen)
        assert (resumed.choices["keep"], resumed.choices["limit"]) == (chosen["keep"], 0.04)
    with pytest.raises(PetraError, match=r"trainer\.memory_limit: expected at least .* in the checkpoint .*, got 1e-06 GB"):
        on_gpus(1.0, "trainer.stages=2", chosen | {"limit": 1e-6})


@pytest.mark.usefixtures("counted_times")
def test_remedies_that_exclude_graphs_leave_them_out(capsys: pytest.CaptureFixture[str]) -> None:
    limits = "method.keep=auto", "trainer.memory_limit=9", "trainer.stages=2"
    found = tune_setup(planned(*TINY, *limits, "remedy=pipemare"), ALONE)
    assert {*found.plan.method.keep[:-1]} == {Keep.NOTHING, Keep.INPUT}
    assert capsys.readouterr().out.startswith("method.keep=auto: no graphs (remedy.")


@pytest.mark.usefixtures("counted_times")
def test_a_stored_format_counts_where_a_chosen_block_stores_its_input(caplog: pytest.LogCaptureFixture) -> None:
    settings = (*TINY, "method.keep=auto", "trainer.stages=2", "method.delay=1", "trainer.stored_format=int8")
    found = tune_setup(planned(*settings, "trainer.memory_limit=9"), ALONE)
    assert ({*found.plan.method.keep}, found.plan.numerics.stored_format) == ({Keep.GRAPH}, None)
    assert caplog.messages == [
        "trainer.stored_format is not used: by the choice for method.keep=auto, no block after the first stores its input"
    ]
    tight = tune_setup(planned(*settings, "trainer.memory_limit=0.038"), ALONE)
    assert [keep for stage in tight.plan.stages for keep in stage.keeps].count(Keep.INPUT) == 1, "the first block fetches its own"
    assert tight.plan.numerics.stored_format == "int8"
    assert len(caplog.messages) == 1


def test_a_recommended_command_has_a_stored_format_only_where_a_block_stores_its_input(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "4", *SMALL, "k=8", "trainer.stored_format=int8"])
    out = capsys.readouterr().out
    assert "- backprop: trainer.stored_format: expected null, since no block after the first stores its input, got int8" in out
    assert "| petra, method.keep=auto " in out
    for command in re.findall("^to train: petra train --nproc 4 (.*)$", out, re.M):
        planned(*shlex.split(command), place=Process(rank=0, world=4, local_rank=0, local_world=4))


def test_another_partition_than_the_checkpoints_is_tuned_again() -> None:
    settings = (*TINY, "method=petra_fresh")
    before = tune_setup(planned(*settings, "trainer.stages=3"), ALONE)
    chosen = json.loads(json.dumps(before.choices))
    assert tune_setup(planned(*settings, "trainer.stages=3"), ALONE, chosen).plan.method.delay == before.plan.method.delay
    other = tune_setup(planned(*settings, "trainer.stages=5"), ALONE, chosen)
    assert len(other.plan.stages) == 5
    assert isinstance(other.plan.method.delay, tuple)
    assert len(other.plan.method.delay) == 4
    auto = (*TINY, "trainer.stages=auto")
    assert [tune_setup(planned(*auto, d), ALONE, chosen).plan.method.delay for d in ("method.delay=0", "method=petra")] == [0, 2]


@pytest.mark.processes
def test_two_processes_tune_and_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["trainer.stages=auto", "method=petra_fresh", "trainer.trace=4", "trainer.stage_metrics=true"]
    with Forked(tmp_path, [*TINY, *settings, f"run_dir={folder}"], 2) as run:
        printed, _ = run.finish()
    assert printed.count("chosen: stages=[") == 1
    assert {"trace.json", "timeline.png", "timeline.svg"} <= {p.name for p in folder.iterdir()}
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in trace} == {0, 1}
    assert {f"{op}{m}" for op in "FB" for m in range(4)} <= {event["name"] for event in trace}
    (row,) = lines(folder / "metrics.jsonl")
    assert {"stage/1/forward_seconds", "stage/2/waiting_seconds", "stage/2/staleness", "stage/1/weight_drift"} <= row.keys()
