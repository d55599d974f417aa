"""Runs under torchrun: restarts of killed processes, signals, open ports, and secrets in output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from stress.kill_many import RUN, children
from tests.launch.test_faults import END, LONG, training
from tests.structure import ROOT
from tests.support.forked import Forked

LOCAL = ("launch.train", "--nproc", "2", *LONG, "resume=auto")
BARE = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch.train", *LONG, "resume=auto")


@contextmanager
def started(folder: Path, launcher: Sequence[str], *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Start an agent with two processes and wait until they train. Kill whatever is left at the end."""
    agent = subprocess.Popen(
        [sys.executable, "-m", *launcher, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
            time.sleep(0.3)
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


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; a zombie has."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def listeners(pid: int) -> set[str]:
    """Return the addresses on which a process listens, in the notation of /proc/net."""
    sockets = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(handle))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.add(address.partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.processes
def test_processes_listen_only_on_the_given_interface(tmp_path: Path) -> None:
    """Only the agent opens other ports, for torchrun's own needs."""
    with Forked(tmp_path, [*LONG, "trainer.transport=edge"], 2, environment={"GLOO_SOCKET_IFNAME": "lo"}) as run:
        training(run)
        for process in run.processes:
            assert process.pid is not None
            assert listeners(process.pid) <= LOOPBACK
            assert listeners(process.pid)


SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "HF_TOKEN": "hf_notarealtokenatall",
}


@pytest.mark.processes
def test_no_secret_reaches_a_log_or_a_run_folder(tmp_path: Path) -> None:
    """Covers a successful run, with Weights & Biases if it is installed, and a run that ends with an error."""
    logger = "wandb" if find_spec("wandb") else "jsonl"
    with Forked(tmp_path / "run", [*RUN, f"logger={logger}"], 1, environment=SECRETS) as run:
        assert run.wait(120) == [0], run.output()
    refused = [*RUN, "run_dir=refused", f"+logger.api_key={SECRETS['WANDB_API_KEY']}"]
    with Forked(tmp_path / "refused", refused, 1, environment=SECRETS) as run:
        assert run.wait(120) == [2], run.output()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        found = [name for name, value in SECRETS.items() if value.encode() in content]
        assert not found, f"{path}: {found}"
