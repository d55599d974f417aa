"""The command that petra plan prints trains what was predicted, and its flags and keys have their effect."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import plan
from launch.config.compose import compose_overrides
from launch.run.build import Setup, set_up
from launch.run.costs import stage_memories, tune_setup
from launch.runtime.rank import Process
from petra import Keep
from petra.cost_model.autotune import Tuned
from petra.method import METHODS, Method
from tests.support.commands import refused

pytestmark = pytest.mark.usefixtures("shared_profiles")

NOTHING: Any = None
SMALL = ["model=revnet18", "model.width=0.0625", "data=synthetic", "data.batch_size=2"]
GRAPHS = (Keep.GRAPH,) * 10
FREE = float("inf")
PRINTED = [
    ("experiment=petra/images method.delay=1", METHODS["petra"], (1,) * 10, None, FREE, "method=petra method.delay=2"),
    ("experiment=petra/images", METHODS["1f1b"], (1,) * 10, None, FREE, "method=1f1b"),
    (
        "experiment=petra/images method.delay=1",
        METHODS["backprop"],
        (10,),
        None,
        FREE,
        "method=backprop trainer.stages=[10] method.delay=0",
    ),
    ("experiment=text_short", METHODS["petra"], (1,) * 8, None, FREE, "method=petra trainer.stages=null"),
    (
        "experiment=lm_parity",
        replace(METHODS["petra"], delay=(1, 2)),
        (9, 3, 4),
        None,
        FREE,
        "method=petra trainer.stages=[9,3,4] method.delay=[1,2]",
    ),
    ("", METHODS["petra"], (1,) * 10, GRAPHS, 5e9, "method=petra method.keep=auto trainer.memory_limit=5"),
    ("", METHODS["petra"], (1,) * 10, GRAPHS, FREE, f"method=petra method.keep=[{','.join(GRAPHS)}]"),
    (
        "",
        replace(METHODS["paci"], name="paci, method.max_updates=5", max_updates=None),
        (1,) * 10,
        None,
        FREE,
        "method=paci method.max_updates=null",
    ),
    ("", replace(METHODS["gpipe"], delay=()), (10,), None, FREE, "method=gpipe trainer.stages=[10]"),
    ("", replace(METHODS["dsp"], keep=Keep.NOTHING), (1,) * 10, None, FREE, "method=dsp method.keep=nothing"),
]


def trained(words: list[str], processes: int) -> Setup:
    return set_up(compose_overrides(words), Process(0, processes, 0, processes))


@pytest.mark.parametrize(("others", "method", "stages", "keep", "limit", "printed"), PRINTED)
def test_the_printed_keys_are_those_that_would_differ(
    others: str, method: Method, stages: tuple[int, ...], keep: tuple[Keep, ...] | None, limit: float, printed: str
) -> None:
    """An experiment may set the stages and keys of the method."""
    row = plan.Candidate(method, Tuned(stages, method.delay, (), (), keep), NOTHING, 0, 0.0, (), limit)
    assert row.setting(others.split()) == printed.split()


def test_the_printed_command_trains_what_was_predicted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows, recommend = dict[str, plan.Candidate](), plan.recommend
    monkeypatch.setattr(plan, "recommend", lambda found: rows.update(recommend(found)) or rows)
    plan.main(["--devices", "8", "experiment=text_short", "trainer.device=cpu"])
    commands = re.findall(r"^to train: (.*)$", capsys.readouterr().out, re.M)
    assert len(commands) == len(rows) > 0
    for command, row in zip(commands, rows.values(), strict=True):
        _, _, flag, processes, *words = shlex.split(command)
        assert flag == "--nproc"
        found = trained(words, int(processes)).plan
        assert tuple(len(stage) for stage in found.layout.stages) == row.tuned.stages
        assert found.method.boundary_delays(7) == row.method.boundary_delays(7)
        assert found.method.keep == (row.tuned.keep or row.method.keep)


def test_messages_follow_the_transport_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a slow link, edge hides what lockstep waits for. One that the processes don't accept is refused."""
    monkeypatch.setattr(plan, "PREDICTED", {})  # other rows remain
    speeds = {}
    words = ["--devices", "4", "--teraflops", "0.001", "--latency", "1e5", *SMALL, "k=8"]
    for transport in ("edge", "lockstep", "auto"):
        plan.main([*words, f"trainer.transport={transport}"])
        row = next(line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| petra, d=auto "))
        speeds[transport] = float(row[3])
    assert speeds["edge"] > speeds["lockstep"] == speeds["auto"]
    error = refused(plan.main, [*words, "trainer.transport=local"])
    assert error == "trainer.transport: expected auto, lockstep or edge in 4 processes, got local"
    assert refused(plan.main, ["--devices", "1", *SMALL, "trainer.transport=edge"]).startswith(
        "trainer.transport: expected auto or l"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--machines FILE --devices 4", "--devices: expected nothing with --machines=FILE, which replaces it, got 4"),
        ("--memory 80 cluster.machines=FILE", "--memory: expected nothing with cluster.machines=FILE, which replaces it, got 80.0"),
        ("--machines FILE --bandwidth 10", "--bandwidth: expected nothing with --machines=FILE, which replaces it, got 10.0"),
        ("--latency 10 --machines FILE", "--latency: expected nothing with --machines=FILE, which replaces it, got 10.0"),
        ("--teraflops 50 --measure", "--teraflops: expected nothing with --measure, which replaces it, got 50.0"),
        ("--machines FILE --teraflops 0", "--teraflops: expected a number >= 1e-6 and <= 1e6, got 0.0"),
        ("--machines FILE --per-machine 0", "--per-machine: expected a number > 0 and <= 1e6, got 0"),
        ("--devices 1000000000000", "--devices: expected a number > 0 and <= 1e6, got 1000000000000"),
        ("--machines missing.yaml", "--machines: expected a YAML or JSON file of devices and links, got missing.yaml"),
        (
            "++trainer.stages=[1,4,5]",
            "trainer.stages: expected auto or null, since petra plan chooses the stages of --devices processes, got [1,4,5]",
        ),
        (
            "--memory 2 trainer.stages=auto trainer.memory_limit=3",
            "--memory: expected nothing, or 3 as trainer.memory_limit, got 2.0",
        ),
        (
            "--machines FILE cluster.machines=other",
            "cluster.machines: expected nothing, or the file of --machines, FILE, got other",
        ),
    ],
)
def test_flags_without_effect_are_refused(words: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("devices: [{}, {}]\nlinks: [{forward: {bandwidth: 1}, backward: {bandwidth: 1}}]\n")
    assert refused(plan.main, [*words.replace("FILE", str(file)).split(), *SMALL]).startswith(message.replace("FILE", str(file)))


def test_the_method_of_the_command_has_a_row_if_petra_chooses_its_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than 64 processes exchange by lockstep, as the run would."""
    monkeypatch.setattr(plan, "PREDICTED", {})
    rows = []
    for words in ("method=dsp method.delay=auto", "method=delayed method.keep=auto"):
        plan.main(["--devices", "2", *SMALL, "trainer.stages=auto", "trainer.memory_limit=1", *words.split()])
        rows.append(re.findall(r"^\| (\S[^|]*auto) ", capsys.readouterr().out, re.M))
    own = {"petra, method.keep=auto", "petra, d=auto"}
    assert [{*found} - own for found in rows] == [{"dsp, method.delay=auto"}, {"delayed, method.keep=auto"}]
    speeds = []
    for transport in ("auto", "lockstep"):
        words = ["--latency", "2e4", "--devices", "2", "k=8", *SMALL, "dp=64", "data.batch_size=64", "trainer.device=cpu"]
        plan.main([*words, f"trainer.transport={transport}"])
        speeds += re.findall(r"^\| 1f1b, [^|]*\|[^|]*\|([^|]*)\|", capsys.readouterr().out, re.M)
    assert speeds[0] == speeds[1]


UNEQUAL = """
devices: [{memory: 1, speed: 8}, {memory: 0.037}]
links: [{forward: {bandwidth: 100}, backward: {bandwidth: 100}}]
"""


@pytest.mark.parametrize("flag", ["--devices", "--machines"])
def test_the_memory_limit_of_a_run_is_that_of_a_plan(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(UNEQUAL)
    with pytest.raises(SystemExit):
        plan.main([flag, "2" if flag == "--devices" else str(file), *SMALL, "trainer.stages=auto", "trainer.memory_limit=1e-6"])
    assert "| petra " not in capsys.readouterr().out


def test_the_printed_command_trains_within_the_memory_of_unequal_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(UNEQUAL)
    monkeypatch.setattr(plan, "recommend", lambda rows: {"here": next(row for row in rows if row.tuned.keep)})
    plan.main(["--machines", str(file), *SMALL, "trainer.device=cpu"])
    (command,) = re.findall(r"^to train: (.*)$", capsys.readouterr().out, re.M)
    words = shlex.split(command)[4:]
    assert {"trainer.memory_limit=1", f"cluster.machines={file}"} <= {*words}
    tuned = tune_setup(trained(words, 2), Process(0, 1, 0, 1))
    chosen = Tuned((8, 2), 3, (), (), tuple(Keep(keep) for keep in tuned.choices["keep"]))
    _, second = stage_memories(tuned, {}, tuned.plan.method, chosen)
    assert second.total <= 0.037e9


@pytest.mark.parametrize("data", [["data=synthetic", "data.images=64"], ["data=text", "model=revgpt", "data.size=8"]])
def test_replicas_share_the_targets_of_a_run(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Sun and sea. " * 500)
    words = [*SMALL, "data.batch_size=8", *data, *([f"data.root={tmp_path}/a.txt"] if "data=text" in data else [])]
    words = [word for word in words if "width" not in word or "model=revgpt" not in data]
    found = [plan._samples(set_up(compose_overrides([*words, f"dp={dp}"]), Process(0, dp, 0, 1))) for dp in (1, 2)]
    assert found[0] == found[1]
    assert found[0] is not None
