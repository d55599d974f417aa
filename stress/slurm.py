"""The shipped Slurm job on a cluster of three nodes on this machine: ``python -m stress.slurm [--only NAME ...]``.

Needs Linux, root, and Debian's packages: ``apt-get install slurmctld slurmd slurm-client iproute2``. Each node has a network
namespace, a host name, eight GPUs that Slurm counts but no program can use, and a slurmd of its own. The nodes share this machine's
files. Authentication is off (``auth/none``), so that no further service is needed. Networks are narrow and train on the CPU. The
output is a Markdown table of what happened. "Equal" means: with the weights, metrics and files of a run without Slurm and without
interruption. An assertion fails where the result differs from docs/clusters.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stress.kill_many import assert_same, assert_undamaged, results
from stress.network import end_processes, network, run
from tests.structure import ROOT
from tests.support.forked import Forked

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "ip", "unshare", "setpriv")
ADDRESSES = {f"petra-n{i}": f"10.97.0.{i}" for i in (1, 2, 3)}
CONTROLLER = "10.97.0.254"
GPUS = 8
START, POLL = 30.0, 0.2
"""Seconds that the daemons may take to start, and between two looks at a job."""
CONFIGURATION = """\
ClusterName=petra
SlurmctldHost={host}({controller})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
ReturnToService=2
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
PartitionName=low Nodes=ALL Default=YES
"""


def missing() -> str | None:
    """Return why this machine cannot run the cluster, or None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return None if os.geteuid() == 0 else "needs root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        folder: Folder of the configuration, state and logs of the daemons.
        nodes: Names of the nodes.
    """

    folder: Path
    nodes: tuple[str, ...]

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, with the node's host name, in the node's namespace."""
        words = ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", f"hostname {node}; exec slurmd -D -N {node}"]
        _daemon(words, self.folder, node)

    def lose_node(self, node: str) -> None:
        """Disconnect a node and end all its processes, as a loss of power does. No other node hears of it."""
        run(f"ip -n {node} link set eth0 down")
        end_processes(node)

    def repair_node(self, node: str) -> None:
        """Start a lost node again, and wait until Slurm uses it."""
        run(f"ip -n {node} link set eth0 up")
        self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes are idle.

        Raises:
            AssertionError: If that takes longer than :data:`START`.
        """
        deadline = time.monotonic() + START
        while (states := self._states()) != ["idle"] * len(self.nodes):
            assert time.monotonic() < deadline, f"nodes are {states}; see {self.folder}/*.log"
            time.sleep(POLL)

    def _states(self) -> list[str]:
        try:
            return self.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return []

    def call(self, *words: str, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
        """Return the output of a command of Slurm.

        Raises:
            AssertionError: If it fails.
        """
        variables = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **(environment or {})}
        done = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self) -> str:
        """Return what Slurm knows of all jobs and nodes, and the last lines of the daemons' logs, for error messages."""
        shown = [self.call("scontrol", "show", kind) for kind in ("job", "node")]
        logs = [f"{path.name}: " + "\n".join(path.read_text().splitlines()[-20:]) for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([*shown, *logs])

    def job(self, number: str) -> dict[str, str]:
        """Return the facts of a job that ``scontrol show job`` prints."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, reached: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Wait until a job's facts satisfy ``reached``, and return them.

        Raises:
            AssertionError: If that takes longer than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not reached(facts := self.job(number)):
            assert time.monotonic() < deadline, f"job {number} is {facts['JobState']} after {seconds} s\n{self.state()}"
            time.sleep(POLL)
        return facts


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, and remove it with all its processes at the end.

    Raises:
        AssertionError: If the nodes are not idle in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, controller = Cluster(folder, tuple(ADDRESSES)), None
    with network("petra-slurm", ADDRESSES, CONTROLLER):
        try:
            _configure(result)
            controller = _daemon(["setpriv", "--pdeathsig", "KILL", "slurmctld", "-D"], folder, "slurmctld")
            for node in result.nodes:
                result.start_node(node)
            result.wait_until_idle()
            yield result
        finally:
            if controller is not None:
                controller.kill()
                controller.wait()


def _configure(wanted: Cluster) -> None:
    lines = [CONFIGURATION.format(host=socket.gethostname(), controller=CONTROLLER, folder=wanted.folder)]
    for node, address in ADDRESSES.items():
        lines.append(f"NodeName={node} NodeAddr={address} CPUs=16 Gres=gpu:{GPUS}\n")
        (wanted.folder / f"spool-{node}").mkdir()
    (wanted.folder / "state").mkdir()
    (wanted.folder / "slurm.conf").write_text("".join(lines))
    (wanted.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; detection needs a mounted /sys/fs/cgroup
    for gpu in range(GPUS):  # a GPU is a file of the kind of /dev/null here
        os.mknod(wanted.folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (wanted.folder / "gres.conf").write_text(f"Name=gpu File={wanted.folder}/gpu[0-{GPUS - 1}]\n")


def _daemon(words: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("a") as log:
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)


JOB = str(ROOT / "launch" / "templates" / "slurm.sbatch")
SMALL = (
    *("data=synthetic", "data.batch_size=4", "data.size=16", "model.width=0.0625", "trainer.device=cpu"),
    "trainer.timeout=120",
)
RUN = (*SMALL, "model=revnet18", "data.images=400", "trainer.epochs=3", "checkpoint.every=20", "trainer.export=pt", "resume=auto")
"""300 microbatches, with a checkpoint every 20."""
LONG = (*RUN, "data.images=400000")
"""Like :data:`RUN`, but so long that only a signal ends it."""
PATIENCE = 400.0
"""Seconds that any step may take."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Suite:
    """The cluster, a folder for the runs, and the results of the uninterrupted run.

    Attributes:
        cluster: The cluster.
        folder: Folder of logs and runs.
    """

    def __init__(self, running: Cluster, folder: Path) -> None:
        self.cluster, self.folder = running, folder
        self._expected: dict[str, Any] | None = None

    def expected(self) -> dict[str, Any]:
        """Return the results of :data:`RUN` in three processes without Slurm."""
        if self._expected is None:
            with Forked(self.folder / "uninterrupted", [*RUN, "run_dir=run"], 3, environment={"GLOO_SOCKET_IFNAME": "lo"}) as run:
                assert run.wait(PATIENCE) == [0, 0, 0], run.output()
            self._expected = results(self.folder / "uninterrupted" / "run")
        return self._expected

    def submit(self, name: str, options: str, overrides: tuple[str, ...], **variables: str) -> str:
        """Submit the shipped job with a run folder ``<name>/run``, and return its number."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        words = ["sbatch", "--parsable", "--output=log.txt", "--open-mode=append", *options.split(), JOB, *overrides, "run_dir=run"]
        return self.cluster.call(*words, environment=environment(**variables), folder=place).strip()

    def log(self, name: str) -> str:
        """Return the output of a job so far."""
        path = self.folder / name / "log.txt"
        return path.read_text() if path.exists() else ""

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a finished run."""
        content: dict[str, Any] = json.loads((self.folder / name / "run" / "summary.json").read_text())
        return content

    def until_ended(self, number: str, name: str, *states: str) -> dict[str, str]:
        """Wait until a job has ended in one of the states."""
        facts = self.cluster.wait(number, lambda job: job["JobState"] in ENDED, PATIENCE)
        assert facts["JobState"] in states, f"{facts['JobState']}:\n{self.log(name)}"
        return facts

    def until(self, name: str, reached: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, self.log(name) + self.cluster.state()
            time.sleep(POLL)

    def until_saved(self, name: str, number: int = 2) -> None:
        """Wait until a run has written some checkpoints."""
        self.until(name, lambda: len(list((self.folder / name / "run" / "checkpoints").glob("0*[0-9]"))) >= number)

    def assert_equal(self, name: str) -> None:
        """Assert that a run ended with the weights, metrics and files of the uninterrupted run."""
        assert_undamaged(self.folder / name / "run", self.expected())
        assert_same(results(self.folder / name / "run"), self.expected(), name)


def shipped(suite: Suite) -> str:
    """The job as shipped, with RevNet-34 on three nodes."""
    number = suite.submit("shipped", "--nodes 3", (*SMALL, "model=revnet34", "data.images=80", "trainer.epochs=1"))
    suite.until_ended(number, "shipped", "COMPLETED")
    line = "18 process(es) for the 18 stages of revnet34: 8 + 8 + 2 on 3 node(s)"
    assert suite.log("shipped").count(line) == 1, suite.log("shipped")
    assert suite.summary("shipped")["processes"] == 18
    return line


def signal_before_time_limit(suite: Suite) -> str:
    """``--signal``: the run saves, the job joins the queue again by itself and resumes; ``scancel`` ends it with a checkpoint."""
    number = suite.submit("signal", "--time 3 --signal=USR1@110", LONG, NPROC="2", NPROC_PER_NODE="1")
    suite.until("signal", lambda: "resuming from" in suite.log("signal"))
    log = suite.log("signal")
    stopped = re.findall(r"stopped on request after microbatch (\d+), checkpoint written", log)
    resumed = re.findall(r"resuming from \S+, after microbatch (\d+)", log)
    assert stopped == resumed[:1], log
    assert "DUE TO TIME LIMIT" not in log
    time.sleep(3)
    suite.cluster.call("scancel", number)
    suite.until_ended(number, "signal", "CANCELLED")
    suite.until("signal", lambda: suite.log("signal").count("stopped on request") == 2)
    return f"saved after microbatch {stopped[0]}, requeued itself and resumed there; scancel: saved again, state CANCELLED"


def requeue(suite: Suite) -> str:
    """``scontrol requeue`` of a running job."""
    number = suite.submit("requeue", "", RUN, NPROC="3", NPROC_PER_NODE="2,1")
    suite.until_saved("requeue")
    suite.cluster.call("scontrol", "requeue", number)
    suite.until("requeue", (suite.folder / "requeue" / "run" / "summary.json").exists)
    suite.until_ended(number, "requeue", "COMPLETED")
    suite.assert_equal("requeue")
    return f"resumed after microbatch {resumed_at(suite.log('requeue'))}; equal"


def lost_node(suite: Suite) -> str:
    """A node loses power: the job starts again on the remaining nodes."""
    number = suite.submit("lost", "--requeue", RUN, NPROC="3", NPROC_PER_NODE="2,1")
    suite.until_saved("lost")
    lost = suite.cluster.nodes[1]
    assert suite.cluster.job(number)["NodeList"] == "petra-n[1-2]"
    suite.cluster.lose_node(lost)
    suite.until("lost", (suite.folder / "lost" / "run" / "summary.json").exists)
    facts = suite.until_ended(number, "lost", "COMPLETED")
    assert facts["NodeList"] == "petra-n[1,3]", facts
    suite.assert_equal("lost")
    suite.cluster.repair_node(lost)
    return f"resumed on {facts['NodeList']} after microbatch {resumed_at(suite.log('lost'))}; equal"


def task_per_gpu(suite: Suite) -> str:
    """One Slurm task per GPU, each of which sees only its GPU: the command of docs/clusters.md, with four tasks."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    command = re.search(r"^srun --ntasks 16 .*?'$", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    script = command[0].replace("--ntasks 16 --ntasks-per-node 8", "--ntasks 4 --ntasks-per-node 2")
    script = script.replace("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=2").replace("exec petra", f"exec {sys.executable} -m petra")
    overrides = " ".join((*SMALL, "model=revnet18", "data.images=80", "trainer.epochs=1", "run_dir=run"))
    script = script.replace("model=revnet34 data=synthetic", overrides)
    script = script.replace("bash -c", "--nodes 2 bash -c", 1).replace(
        "'RANK", "'echo GPU $SLURM_NODEID $CUDA_VISIBLE_DEVICES; RANK", 1
    )
    place = suite.folder / "tasks"
    place.mkdir()
    printed = suite.cluster.call("bash", "-c", script, environment=environment(), folder=place)
    seen = re.findall(r"^GPU (\d) (\d)$", printed, re.MULTILINE)
    assert sorted(seen) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], printed
    assert suite.summary("tasks")["processes"] == 4
    return "4 tasks on 2 nodes, each with another visible GPU; one run of 4 processes"


def resumed_at(log: str) -> str:
    found = re.search(r"resuming from \S+, after microbatch (\d+)", log)
    assert found is not None, log
    return found[1]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a job's submission."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PATH": path, **variables}


SCENARIOS: dict[str, Callable[[Suite], str]] = {
    scenario.__name__: scenario for scenario in (shipped, task_per_gpu, requeue, lost_node, signal_before_time_limit)
}


def main() -> None:
    """Run the scenarios and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME", help=", ".join(SCENARIOS))
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as name, cluster(Path(name, "slurm")) as running:
        suite = Suite(running, Path(name, "runs"))
        suite.folder.mkdir()
        print("| scenario | seconds | result |", "|---|---|---|", sep="\n", flush=True)
        for scenario in options.only:
            started = time.monotonic()
            result = SCENARIOS[scenario](suite)
            print(f"| {scenario.replace('_', ' ')} | {time.monotonic() - started:.0f} | {result} |", flush=True)


if __name__ == "__main__":
    main()
