"""Copies of the state in memory: which rank keeps whose copy, and resuming from them with the bits of an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.runtime import memory
from petra import PetraError, Pipeline
from petra.training import Mirror, sgd
from petra.training.mirror import available, name, neighbours, newest_mirrored, read_mirrored, restore_mirrored
from tests.commands import ROOT
from tests.kill_many import children, results
from tests.support.forked import Forked
from tests.support.nets import RandomSource, mixed_net
from tests.support.processes import run_processes

RUN = (
    *("data=synthetic", "data.images=64", "data.batch_size=4", "data.size=16", "model.width=0.0625", "trainer.device=cpu"),
    *("trainer.epochs=2", "trainer.export=pt", "trainer.timeout=30", "run_dir=run", "resume=auto"),
)
"""Two epochs of 16 microbatches."""
EVERY = 5
PATIENCE = 120


def test_the_copy_is_on_the_next_machine() -> None:
    assert neighbours("aaa") == [None] * 3
    assert neighbours("aabb") == [2, 3, 0, 1]
    assert neighbours("aaab") == [3, 3, 3, 0]
    assert neighbours("abab") == [1, 0, 3, 2]


def pipeline(dp: int = 1) -> Pipeline:
    return Pipeline(mixed_net(), RandomSource(batch=4).spec, k=3, optimizer=sgd, learning_rate=lambda t: 0.02, dp=dp)


def resumed_after_the_loss_of_a_machine(rank: int, folder: Path, dp: int) -> dict[str, Any]:
    """Four processes on two machines. The memory of the second machine is lost between two runs."""
    own = folder / f"machine{rank // 2}"
    own.mkdir(exist_ok=True)
    data, run = RandomSource(batch=4), pipeline(dp)
    mirror = Mirror(own, 0)
    for count in (4, 3):
        run.train(data, count)
        mirror.save(run, {"rank": rank})
    mirror.wait()
    dist.barrier()
    files = sorted(path.name for path in own.iterdir())
    dist.barrier()
    run.train(data, 6)
    if rank == 2:
        for path in own.iterdir():
            path.unlink()
    dist.barrier()
    processes = 4 // dp
    clock = newest_mirrored(own, processes)
    assert clock is not None
    state, facts = read_mirrored(own, clock, processes)
    again = pipeline(dp)
    restore_mirrored(again, state, clock)
    again.train(data, 6)
    Mirror(own, 0)  # a run from its start does not keep copies of later drains
    dist.barrier()
    left = [*available(own)]
    same = all(torch.equal(value, run.state_dict()[key]) for key, value in again.state_dict().items())
    return {"files": files, "clock": clock, "facts": facts, "same": same, "left": left}


@pytest.mark.processes
@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_resumes_when_the_memory_of_a_machine_is_lost(dp: int, tmp_path: Path) -> None:
    parts = run_processes(4, resumed_after_the_loss_of_a_machine, tmp_path / "processes", tmp_path, dp)
    for part in parts:
        assert part["files"] == sorted(name(rank, 7) for rank in range(4))
        assert part["clock"] == 7
        assert part["facts"] == {"rank": 0}
        assert part["same"]
        assert part["left"] == []


def incomplete(rank: int, folder: Path) -> tuple[int | None, str]:
    """Return the newest complete clock if one rank has a newer copy, and the error of a full memory."""
    run = pipeline()
    mirror = Mirror(folder, 0)
    mirror.save(run, {})
    mirror.wait()
    if rank:
        (folder / name(1, 5)).write_bytes(b"")
    dist.barrier()
    newest = newest_mirrored(folder, 2)
    dist.barrier()
    if rank:
        mirror.folder = Path("/dev/full/nowhere")
    mirror.save(run, {})
    with pytest.raises(PetraError) as caught:
        mirror.wait()
    return newest, str(caught.value)


@pytest.mark.processes
def test_only_complete_copies_count_and_all_processes_raise_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    for newest, error in run_processes(2, incomplete, tmp_path / "processes", folder):
        assert newest == 0
        assert re.fullmatch(
            r"checkpoint.mirror: /dev/full/nowhere cannot be written \(.+\); checkpoints on storage are intact", error
        )


def test_a_folder_in_memory_ends_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the owner is killed. Folders whose keeper was killed are removed by the next run."""
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        monkeypatch.setattr(os, "getppid", lambda: owner.pid)
        folder = memory.memory_folder("run")
        (folder / "0-5.pt").touch()
        assert memory.memory_folder("run") == folder
        assert memory.memory_folder("another run") != folder
        assert folder.stat().st_mode & 0o777 == 0o700
        owner.kill()
    deadline = time.monotonic() + 20
    while any(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    abandoned = tmp_path / folder.name
    abandoned.mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    memory.remove_abandoned()
    assert not abandoned.exists()


def folders() -> set[Path]:
    return set(memory.MEMORY.glob("petra-*"))


@pytest.mark.processes
def test_a_killed_run_resumes_from_memory_with_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """Without a checkpoint on storage until the end of an epoch. Nothing is left in memory."""
    before, mirrored = folders(), [*RUN, f"checkpoint.mirror={EVERY}"]
    with Forked(tmp_path / "whole", [*RUN, f"checkpoint.every={EVERY}"], 2) as run:
        assert run.wait(PATIENCE) == [0, 0], run.output()
    for victim in range(2):
        with Forked(tmp_path / "killed", mirrored, 2) as run:
            wait_for_copies(before, EVERY if victim == 0 else 16 + EVERY, 2)
            run.signal(signal.SIGKILL, [victim])
            run.signal(signal.SIGTERM)
            run.wait(PATIENCE)
    with Forked(tmp_path / "killed", mirrored, 2) as run:
        assert run.wait(PATIENCE) == [0, 0], run.output()
        found = re.search(r"^resuming from copies in memory, after microbatch (\d+)$", run.output("out"), re.MULTILINE)
    assert found
    assert int(found[1]) >= 16
    weights, expected = (results(tmp_path / place / "run")["weights"] for place in ("killed", "whole"))
    assert all(torch.equal(value, weights[key]) for key, value in expected.items())
    deadline = time.monotonic() + 20
    while folders() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_copies(before: set[Path], clock: int, ranks: int) -> None:
    """Wait until new folders in memory have copies of this or a later drain from all ranks."""
    deadline = time.monotonic() + PATIENCE
    while len({rank for folder in folders() - before for rank, found in available(folder) if found >= clock}) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def agent(number: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start torchrun's agent of one of two machines with a process each. Its output goes to a file."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "run", "--local-addr", "127.0.0.1"]
    conf = f"is_host={number == 0}"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
    program = ["-m", "launch.train", *RUN, f"checkpoint.mirror={EVERY}"]
    with (folder / f"agent{number}").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, *program],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_torchrun_restarts_a_run_on_two_machines(tmp_path: Path) -> None:
    """The process of one machine is killed. The agents count restarts differently."""
    before = folders()
    with Forked(tmp_path / "whole", [*RUN, f"checkpoint.every={EVERY}"], 2) as run:
        assert run.wait(PATIENCE) == [0] * 2, run.output()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [agent(number, tmp_path, port) for number in range(2)]
    try:
        wait_for_copies(before, EVERY, 2)
        os.kill(children(agents[1].pid)[0], signal.SIGKILL)
        statuses = [process.wait(PATIENCE) for process in agents]
        output = "".join((tmp_path / f"agent{number}").read_text() for number in range(2))
        assert statuses == [0, 0], output
    finally:
        for process in agents:
            for pid in (*children(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    assert len(re.findall(r"^resuming from copies in memory, after microbatch \d+$", output, re.MULTILINE)) == 1
    weights, expected = (results(place)["weights"] for place in (tmp_path / "run", tmp_path / "whole" / "run"))
    assert all(torch.equal(value, weights[key]) for key, value in expected.items())
