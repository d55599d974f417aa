"""Runs that are killed, stopped, out of memory or asked to stop, also under torchrun; open ports, and secrets in output."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from launch.run import records
from launch.runtime.rank import Process
from launch.runtime.reporting import report_errors
from petra.engine.stage import Stage
from petra.errors import DataError, ModelError
from petra.specs import Streams
from stress.kill_many import children
from tests.support.forked import Forked, used
from tests.support.processes import PIPES, environment, is_running

LONG = (
    *("data=synthetic", "data.images=10000", "data.batch_size=4", "data.size=16", "model.width=0.0625", "trainer.device=cpu"),
    "run_dir=run",
)
"""A run whose epoch takes minutes."""
MESSAGE = r"(receiving|sending|exchanging) the message of stage \d+ to stage \d+( and back)?, microbatch \d+"
TIMEOUT, START, END = 3, 60, 30
"""Seconds: trainer.timeout, limit of the start, and limit of the exit in addition to the timeout."""


def training(run: Forked) -> None:
    """Wait until all processes of a run are training."""
    deadline = time.monotonic() + START
    while "records in" not in run.output("out"):
        assert all(process.is_alive() for process in run.processes), run.output()
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.01)
    for process in run.processes:
        used(process.pid, used(process.pid, 0) + 0.2)


def errors(run: Forked) -> list[str]:
    return [line for line in run.output().splitlines() if line.startswith("error: ")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "transport"), [(signal.SIGKILL, "lockstep"), (signal.SIGSTOP, "edge")], ids=["killed", "stopped"]
)
def test_a_lost_process_ends_all_within_the_timeout(number: signal.Signals, transport: str, tmp_path: Path) -> None:
    """Only the timeout detects a stopped process. It exits as well once it continues."""
    with Forked(tmp_path, [*LONG, f"trainer.transport={transport}", f"trainer.timeout={TIMEOUT}"], 3) as run:
        training(run)
        lost = time.monotonic()
        run.signal(number, [1])
        statuses = run.wait(TIMEOUT + END, but=[1])
        waited = time.monotonic() - lost
        assert (statuses[0], statuses[2]) == (2, 2), run.output()
        assert number == signal.SIGKILL or waited > TIMEOUT / 2
        assert len(errors(run)) == 1, run.output()
        assert re.fullmatch(rf"error: {MESSAGE}: .*; another process has died, hangs or can't be reached", errors(run)[0])
        assert "Traceback" not in run.output()
        run.signal(signal.SIGCONT)
        assert all(run.wait(END))
        assert len(errors(run)) == 1


def fail_at(microbatch: int, operation: str, failure: Callable[[], object], rank: int) -> None:
    """Make the first stage of rank 1 fail at a microbatch."""
    if rank != 1:
        return
    whole = getattr(Stage, operation)

    def failing(stage: Stage, *arguments: object) -> object:
        if operation == "evaluate" or arguments[0] == microbatch:
            failure()
        return whole(stage, *arguments)

    setattr(Stage, operation, failing)


def raise_(error: Exception) -> None:
    raise error


MEMORY = r"error: out of memory in stage 10, microbatch 5, backward: can't allocate memory: you tried to allocate \d+ bytes"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("operation", "fails", "told"),
    [
        ("backward", partial(torch.empty, 2**58), MEMORY),
        ("evaluate", partial(raise_, ValueError("a bug")), "in stage 6, microbatch 0, evaluation"),
        ("forward", partial(raise_, DataError("got 7")), r"error: got 7 \(in stage 6, microbatch 5, forward\)"),
        ("evaluate", partial(raise_, ModelError("got 7")), r"error: got 7 \(in stage 6, microbatch 0, evaluation\)"),
    ],
)
def test_a_failing_stage_is_reported_once(operation: str, fails: Callable[[], object], told: str, tmp_path: Path) -> None:
    with Forked(tmp_path, [*LONG, "trainer.limit_batches=8"], 2, prepare=partial(fail_at, 5, operation, fails)) as run:
        statuses = run.wait(START)
    assert all(statuses)
    lines = [line for line in run.output().splitlines() if re.fullmatch(told, line)]
    assert len(lines) == 1, run.output()
    assert run.output().count("Traceback (most recent call last)") == (not told.startswith("error: "))
    assert errors(run) == [line for line in lines if line.startswith("error: ")]


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "allocation failed"), (torch.OutOfMemoryError(f"{CUDA}. GPU 0 has a capacity of 79.10 GiB."), CUDA)],
)
def test_out_of_memory_is_one_line(error: Exception, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    error.add_note("in stage 6, microbatch 5, forward")
    with pytest.raises(SystemExit) as ended, report_errors(Process(0, 1, 0, 1)):
        raise error
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: out of memory in stage 6, microbatch 5, forward: {told}\n")


def test_only_errors_that_all_ranks_raise_wait_for_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in training begins at one rank, which reports it at once and says where."""
    waits: list[float] = []
    monkeypatch.setattr("launch.runtime.reporting.time.sleep", waits.append)
    for notes, told in ((["in stage 2, microbatch 5, forward"], "got 7 (in stage 2, microbatch 5, forward)"), ([], "got 7")):
        for rank in (0, 1):
            error = DataError("got 7")
            for note in (*notes, "the pipeline was last drained after microbatch 0"):
                error.add_note(note)
            with pytest.raises(SystemExit), report_errors(Process(rank, 2, rank, 2)):
                raise error
            assert capsys.readouterr().err == f"error: {told}\n"
    assert [wait > 0 for wait in waits] == [False, False, False, True]


def own_session(rank: int) -> None:
    os.setsid()


@pytest.mark.processes
def test_a_signal_to_every_process_of_a_job_lets_it_save(tmp_path: Path) -> None:
    """Includes the processes that prepare data."""
    with Forked(tmp_path, [*LONG, "data.workers=1", "checkpoint.every=4"], 2, prepare=own_session) as run:
        training(run)
        for process in run.processes:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGHUP)
        assert run.wait(END) == [75, 75], run.output()
    assert re.fullmatch(r"stopped on request after microbatch \d+, checkpoint written; .*\n", run.output())


def on_its_own_disk(rank: int) -> None:
    os.mkdir(f"disk{rank}")
    os.chdir(f"disk{rank}")
    records.SHARED_WITHIN = 0.5


@pytest.mark.processes
def test_a_run_folder_that_one_machine_alone_sees_is_refused_before_training(tmp_path: Path) -> None:
    with Forked(tmp_path, [*LONG, "run_dir=run"], 2, prepare=on_its_own_disk) as run:
        assert run.wait(START) == [2, 2]
    assert errors(run) == [
        "error: run_dir: expected a folder on storage that all machines share, or checkpoint.keep=0, "
        f"got run/checkpoints, which {socket.gethostname()} does not see"
    ]
    assert not [*(tmp_path / "disk0").iterdir()]


def slow_forward(rank: int) -> None:
    forward = Stage.forward

    def slowly(stage: Stage, m: int, x: Streams) -> Streams:
        time.sleep(0.13)
        return forward(stage, m, x)

    Stage.forward = slowly  # type: ignore[method-assign]


@pytest.mark.processes
def test_a_process_without_a_stage_waits_for_those_that_work(tmp_path: Path) -> None:
    overrides = ["trainer.stages=2", "trainer.epochs=1", "trainer.limit_batches=60", "checkpoint.every=1000"]
    with Forked(tmp_path, [*LONG, *overrides, "trainer.timeout=6"], 3, prepare=slow_forward) as run:
        assert run.wait(START) == [0, 0, 0], run.output()


@pytest.mark.processes
def test_runs_of_one_start_join_anew(tmp_path: Path) -> None:
    overrides = ["data.images=8", "trainer.epochs=1", "k=1,2", "run_dir=null", "--multirun"]
    with Forked(tmp_path, [*LONG, *overrides], 2) as run:
        assert run.wait(START) == [0, 0], run.output()
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 2


LOCAL = ("launch.train", "--nproc", "2", *LONG, "resume=auto")
BARE = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch.train", *LONG, "resume=auto")


@contextmanager
def started(folder: Path, launcher: Sequence[str], *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Start an agent with two processes and wait until they train. Kill whatever is left at the end."""
    agent = subprocess.Popen([sys.executable, "-m", *launcher, *overrides], cwd=folder, env=environment(), **PIPES)
    try:
        assert agent.stdout is not None
        while (line := agent.stdout.readline()) and "records in" not in line:
            pass
        assert line
        time.sleep(0.3)
        yield agent
    finally:
        for pid in (*children(agent.pid), agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


@pytest.mark.processes
def test_the_agent_forwards_signals_and_exits_with_the_status_of_the_run(tmp_path: Path) -> None:
    """SIGUSR1: checkpoint and status 75. Two Ctrl-C in the resumed run: immediate exit with status 130."""
    with started(tmp_path, LOCAL, "checkpoint.every=4") as agent:
        agent.send_signal(signal.SIGUSR1)
        _, told = agent.communicate(timeout=END)
        assert agent.returncode == 75, told
        (command,) = re.findall(
            r"^stopped on request after microbatch \d+, checkpoint written; to continue: petra (.*)$", told, re.M
        )
    with started(tmp_path, ["petra", *command.split()]) as agent:
        workers = children(agent.pid)
        for _ in range(2):
            agent.send_signal(signal.SIGINT)
            time.sleep(0.1)
        _, told = agent.communicate(timeout=END)
        assert agent.returncode == 130, told
        assert "Traceback" not in told
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.processes
def test_processes_stop_when_their_agent_is_killed(tmp_path: Path) -> None:
    """They write a checkpoint first. The restarted job resumes from it."""
    with started(tmp_path, BARE) as agent:
        workers = children(agent.pid)
        agent.kill()
        deadline = time.monotonic() + END
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert list((tmp_path / "run" / "checkpoints").glob("0*"))
