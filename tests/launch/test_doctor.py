"""launch.doctor and launch.selftest: links with a known speed, machines with known problems, and what counts as a failure."""

import os
import resource
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from launch.doctor import command as doctor
from launch.doctor import links
from launch.doctor.links import LARGE_MESSAGE, Links
from launch.doctor.machine import Report, find_differences, inspect_machine
from launch.runtime.rank import Process
from launch.selftest import command as selftest
from launch.selftest.command import heading, reasons, run_all, write_report
from launch.selftest.parts import PARTS
from launch.selftest.plan import LARGEST_DIFFERENCE, Trial, judge, plan
from petra import METHODS
from petra.cost_model.machines import Connection, Link
from tests.support.commands import ALONE, refused
from tests.support.processes import run_processes

CPU = torch.device("cpu")


def slow_links(rank: int) -> Links:
    """Delay large messages from rank 1 to rank 2 by a second, and small messages from rank 2 by 0.1 s."""
    send = dist.send

    def slowly(tensor: torch.Tensor, peer: int, group: object = None) -> None:
        time.sleep(
            {1: 1.0 * (tensor.nbytes == LARGE_MESSAGE and peer == 2), 2: 0.1 * (tensor.nbytes < LARGE_MESSAGE)}.get(rank, 0.0)
        )
        send(tensor, peer)

    links.dist.send, links.ROUND_TRIPS, links.MESSAGES = slowly, 10, 2  # type: ignore[attr-defined]
    return links.measure_links(CPU)


@pytest.mark.processes
def test_links_are_measured_one_by_one(tmp_path: Path) -> None:
    first, second, third = run_processes(3, slow_links, tmp_path)
    assert first == second == third
    assert [*first] == [(0, 1), (1, 2)]
    fast, slow = first.values()
    assert 0 < fast.forward.latency < 0.05 <= slow.forward.latency
    assert (
        slow.forward.bandwidth < LARGE_MESSAGE / 1.0 < min(link.bandwidth for link in (slow.backward, fast.forward, fast.backward))
    )


def test_differences_between_processes() -> None:
    nodes, broken = ("0 (a)", "1 (b)") * 2, (("broken",), ()) * 2
    devices, versions = ("cuda:0", "cuda:0", "cuda:0", "cpu"), ("2.13", "2.13", "2.13", "2.11")
    reports = [Report(i, nodes[i], devices[i], 2**30, 8, {"PyTorch": versions[i]}, {}, broken[i]) for i in range(4)]
    assert find_differences(reports, replica_size=4) == [
        "node 0 (a): broken",
        "PyTorch: expected the same version on every rank, got 2.13 (rank 0), 2.11 (rank 3)",
        "ranks 0 to 3: 3 boundaries are between nodes, 1 would do; run consecutive ranks on each node, and a "
        "multiple of 4 if that many fit",
        "devices: expected the same kind on every rank, got cpu and cuda",
    ]


def test_a_link_much_slower_than_others_of_its_kind_is_a_problem() -> None:
    reports = [Report(i, "1" if i > 3 else "0", "cpu", 0, 1, {}, {}, ()) for i in range(6)]
    speeds = {(0, 1): (24, 24), (1, 2): (24, 7), (2, 3): (20, 25), (3, 4): (1, 1), (4, 5): (9, 30)}
    measured = {pair: Connection(*(Link(gb * 1e9, 1e-5) for gb in both)) for pair, both in speeds.items()}
    expected = "ranks 1 – 2: expected about 14.5 GB/s, the median of the links inside a node, got 7 GB/s"
    assert list(links.slow_links(reports, measured)) == []
    measured[1, 2] = Connection(Link(24e9, 1e-5), Link(4e9, 1e-5))
    assert list(links.slow_links(reports, measured)) == [expected.replace("7", "4")]
    assert expected.replace("7", "4") in doctor.report_text(reports, measured, [])


def test_problems_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert inspect_machine(ALONE, CPU, requested="cpu").problems == ()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    nodes = Process(rank=0, world=4, local_rank=0, local_world=2)
    found = inspect_machine(nodes, CPU, requested="cpu")
    assert found.node == "0 (here)"
    assert found.environment["NCCL_P2P_DISABLE"] == "1"
    assert found.problems == (
        "here resolves to 127.0.1.1, which other nodes can't reach: set GLOO_SOCKET_IFNAME",
        "NCCL_P2P_DISABLE=1: messages may take a slower path than necessary",
        "2 core(s) for 2 process(es) with 2 thread(s) each: stages slow each other down",
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not any("resolves" in text for text in inspect_machine(nodes, CPU).problems)


def test_problems_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100 MIG 3g.40gb", total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64 * 2**20))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**23, 2**23))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = inspect_machine(ALONE, torch.device("cuda", 0))
    assert (found.device, found.memory) == ("cuda:0 (H100 MIG 3g.40gb)", 2**36)
    assert "/dev/shm: expected 1 GiB or more (docker run --shm-size=8g), got 64 MiB" in found.problems
    assert "cuda:0 can't access cuda:1 directly: messages between them go through host memory" in found.problems
    assert "cuda:0 is a MIG instance: NCCL refuses two instances of one GPU" in found.problems
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    missing = "no GPU: PyTorch is built for CUDA 13.0 but finds no GPU"
    assert any(text.startswith(missing) for text in inspect_machine(ALONE, CPU).problems)
    assert not any(text.startswith(missing) for text in inspect_machine(ALONE, CPU, requested="cpu").problems)


def test_the_doctor_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_DEBUG": "INFO"})
    monkeypatch.setattr(sys, "argv", ["doctor", "trainer.device=cpu"])
    doctor.main()
    out = capsys.readouterr().out
    assert f"PyTorch {torch.__version__}" in out
    assert f"| 0 | 0 ({socket.gethostname()}) | cpu |" in out
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in out
    assert "NCCL_DEBUG=INFO" in out


def test_the_doctor_says_first_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the CPU is asked for, also in one of several processes."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, expected in (([], True), (["trainer.device=cpu"], False)):
        monkeypatch.setattr(sys, "argv", ["doctor", *words])
        doctor.main()
        out = capsys.readouterr().out
        assert out.startswith("no GPU: PyTorch ") is expected
        assert ("\nProblems:\n" in out and "): no GPU: PyTorch" in out) is expected
    reports = [Report(i, "0", f"cuda:{i}", 0, 1, {}, {}, ("no GPU: the driver is missing",) * (i == 3)) for i in range(4)]
    assert doctor.report_text(reports, {}, []).startswith("no GPU: the driver is missing\n")


def test_the_selftest_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused unless small runs are asked for. A test of nothing is no success. Git ignores the report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(selftest, "run_all", lambda *arguments: found)
    assert refused(selftest.main, []).startswith("no GPU: expected one, or --tiny for small runs on the CPU, got PyTorch ")
    assert refused(selftest.main, ["--tiny", "--only", "no such part"], silent=False).startswith(
        "--only: expected a text in torch."
    )
    assert refused(selftest.main, ["--tiny", "--quick", "--full"]).endswith("argument --full: not allowed with argument --quick")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        selftest.main(["--tiny", "--only", "plain operations"])
    found["reversible block and InPlace-ABN against plain operations"] = {"findings": {"difference": 0.0}, "duration": 1.0}
    selftest.main(["--tiny", "--only", "plain operations"])
    first, second = capsys.readouterr().out.split("no GPU (PyTorch ")[1:]
    assert first.endswith("\nno part passed\n")
    assert second.endswith("report: runs/selftest/selftest.md\n")
    assert (tmp_path / "runs/selftest/selftest.json").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "cluster.machines: expected a file to write, got the folder folder"),
        ("file/machines.yaml", "file/machines.yaml: cannot be written (File exists)"),
    ],
)
def test_a_file_of_machines_that_cannot_be_written_is_refused_before_the_measurements(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launch.doctor.command.inspect_machine", None)
    Path("folder").mkdir()
    Path("file").touch()
    monkeypatch.setattr("sys.argv", ["petra doctor", "trainer.device=cpu", f"cluster.machines={path}"])
    assert refused(doctor.main, None) == message
    assert {found.name for found in Path().rglob("*")} == {"folder", "file"}


TINY = {"model": "revnet18", "width": 0.125, "size": 8, "batch": 2, "method": "petra", "k": 1, "microbatches": 2}


def test_all_methods_and_both_transports_are_tested_in_any_machine() -> None:
    for gpus, tiny in ((0, True), (4, False)):
        trials = [*plan(gpus, bool(gpus), tiny, True)]
        assert {trial.options.get("method", "petra") for trial in trials if trial.part == "compare"} == {*METHODS}
        assert {trial.options.get("transport") for trial in trials if trial.part == "train"} == {"lockstep", "edge", None}
        assert {trial.options["device"] for trial in trials} == {"cuda" if gpus else "cpu"}
        assert len({trial.name for trial in trials}) == len(trials)
    quick, alone = [*plan(4, True, False, False)], [*plan(1, True, False, False)]
    assert [(trial.part, trial.processes) for trial in quick[:3]] == [("exchange", 4), ("inspect", 4), ("train", 4)]
    assert {trial.processes for trial in quick} == {1, 2, 4}
    assert {trial.processes for trial in alone} == {1}  # NCCL refuses two processes on one GPU


def test_parts_on_the_cpu() -> None:
    """A run equals itself, its memory is predicted, and its digest depends on its length only."""
    assert PARTS["compare"](TINY, CPU, ALONE) == {"difference": 0.0, "repeatable": True}
    assert PARTS["blocks"]({}, CPU, ALONE)["difference"] < 1e-5
    speed = PARTS["speed"](TINY, CPU, ALONE)
    assert min(speed["samples_per_second"], speed["peak_bytes"], speed["predicted_tensor_bytes"]) > 0
    assert PARTS["resume"]({"folder": "missing"}, CPU, Process(1, 2, 1, 2)) == {"equal": None}
    first, second = (PARTS["train"]({**TINY, "microbatches": count}, CPU, ALONE) for count in (4, 5))
    assert first["repeatable"]
    assert first["digest"] != second["digest"]


def test_what_counts_as_a_failure() -> None:
    def result(found: dict[str, object], part: str = "compare", **options: object) -> str:
        return judge(Trial(part, "own", options), found, {"one": {"digest": "b"}})

    assert result({"difference": LARGEST_DIFFERENCE / 2, "repeatable": True}) == "passed"
    assert result({"difference": 2 * LARGEST_DIFFERENCE}, tolerance=0.1) == "passed"
    assert "differ" in result({"difference": float("nan"), "repeatable": True})
    assert "two runs" in result({"difference": 0.0, "repeatable": False})
    assert result({"equal": None}).startswith("left out: the folder")
    assert "without petra" in result({"equal": False}, "exchange")
    assert result({"largest_message_bytes": 10**6}, least_bytes=2 * 10**6) == "failed: messages have 1.0 MB, fewer than 2"
    assert result({"digest": "b"}, same_as="one") == "passed"
    assert result({"digest": "a"}, same_as="one process") == "passed, but one process did not run to compare with"
    assert result({"digest": "a"}, same_as="one") == "failed: weights differ from those of one"


@pytest.mark.processes
def test_a_part_that_fails_is_reported_with_its_reason(tmp_path: Path) -> None:
    trials = [Trial("compare", "wrong", {**TINY, "device": "tpu"}), Trial("compare", "late", {})]
    found = run_all(trials[:1], 60, time.monotonic() + 100, tmp_path) | run_all(trials[1:], 60, time.monotonic(), tmp_path)
    assert found["wrong"]["result"].startswith("failed: rank 0: error: trainer.device: expected ")
    assert "got tpu" in found["wrong"]["result"]
    (log,) = tmp_path.rglob("stderr.log")
    log.write_text(f"error: of an earlier part\n{heading('own')}\nerror: own\n")
    assert reasons(tmp_path, "own") == ["rank 0: error: own"]
    results = [part["result"] for part in write_report(trials, 0, True, tmp_path, found)]
    assert results == [found["wrong"]["result"], "left out: no time"]
