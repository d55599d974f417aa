"""The shipped Slurm job on a cluster of three nodes on this machine: ``python -m stress.slurm [--only NAME ...]``.

Needs Linux, root, and Debian's packages: ``apt-get install slurmctld slurmd slurm-client iproute2``. Each node has a network
namespace, a host name, eight GPUs that Slurm counts but no program can use, and a slurmd of its own. The nodes share this machine's
files. Authentication is off (``auth/none``), so that no further service is needed. Networks are narrow and train on the CPU. The
output is a Markdown table of what happened. "Equal" means: with the weights, metrics and files of a run without Slurm and without
interruption. An assertion fails where the result differs from docs/clusters.md.
"""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stress.frame import PATIENCE, SMALL, assert_same, assert_undamaged, parser_of, results, resumed_at, saved, until
from stress.network import end_processes, network, run
from tests.structure import ROOT
from tests.support.forked import Forked
from tests.support.processes import environment

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "ip", "unshare", "setpriv")
ADDRESSES = {f"petra-n{i}": f"10.97.0.{i}" for i in (1, 2, 3)}
CONTROLLER = "10.97.0.254"
GPUS = 8
START = 30.0
"""Seconds that the daemons may take to start."""
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


JOB = str(ROOT / "launch" / "templates" / "slurm.sbatch")
NARROW = (*SMALL, "trainer.timeout=120")
RUN = (*NARROW, "model=revnet18", "data.images=400", "trainer.epochs=3", "checkpoint.every=20", "trainer.export=pt")
"""300 microbatches, with a checkpoint every 20."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def missing() -> str | None:
    """Return why this machine cannot run the cluster, or None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return None if os.geteuid() == 0 else "needs root"


class Cluster:
    """A running cluster.

    Attributes:
        folder: Folder of the configuration, state and logs of the daemons.
        runs: Folder of the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder / "slurm", folder / "runs"
        self._variables = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        for name in ("", "state", *(f"spool-{node}" for node in ADDRESSES)):
            (self.folder / name).mkdir()
        self.runs.mkdir()
        lines = [CONFIGURATION.format(host=socket.gethostname(), controller=CONTROLLER, folder=self.folder)]
        lines += [f"NodeName={node} NodeAddr={place} CPUs=16 Gres=gpu:{GPUS}\n" for node, place in ADDRESSES.items()]
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; detection needs a mounted /sys/fs/cgroup
        for gpu in range(GPUS):  # a GPU is a file of the kind of /dev/null here
            os.mknod(self.folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")

    def daemon(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a daemon, whose output goes to a log."""
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(words, env=self._variables, stdout=log, stderr=log, start_new_session=True)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, with the node's host name, in the node's namespace."""
        self.daemon(node, "ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", f"hostname {node}; exec slurmd -D -N {node}")

    def wait_until_idle(self) -> None:
        """Wait until Slurm can use all nodes."""
        until(lambda: self._states() == ["idle"] * len(ADDRESSES), self._states, seconds=START)

    def _states(self) -> list[str]:
        try:
            return self.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return []

    def call(self, *words: str, folder: Path | None = None, **variables: str) -> str:
        """Return the output of a command of Slurm.

        Raises:
            AssertionError: If it fails.
        """
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        known = environment(SLURM_CONF=self._variables["SLURM_CONF"], PATH=path, GLOO_SOCKET_IFNAME="eth0", **variables)
        done = subprocess.run(words, env=known, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the facts of a job that ``scontrol show job`` prints."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def submit(self, name: str, options: str, overrides: tuple[str, ...], **variables: str) -> str:
        """Submit the shipped job with a run folder ``<name>/run``, and return its number."""
        place = self.runs / name
        place.mkdir(exist_ok=True)
        words = ["sbatch", "--parsable", "--output=log.txt", "--open-mode=append", *options.split(), JOB, *overrides]
        return self.call(*words, folder=place, **variables).strip()

    def log(self, name: str) -> str:
        """Return the output of a job so far."""
        path = self.runs / name / "log.txt"
        return path.read_text() if path.exists() else ""

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a finished run."""
        content: dict[str, Any] = json.loads((self.runs / name / "run" / "summary.json").read_text())
        return content

    def until(self, name: str, reached: Callable[[], Any]) -> None:
        """Wait until a condition holds. If it never does, show what Slurm knows, and the ends of the daemons' logs."""

        def output() -> str:
            shown = [self.call("scontrol", "show", kind) for kind in ("job", "node")]
            logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
            return "\n".join([self.log(name), *shown, *logs])

        until(reached, output, between=lambda: time.sleep(0.2))

    def until_ended(self, number: str, name: str, state: str) -> dict[str, str]:
        """Wait until a job has ended in a state, and return its facts."""
        self.until(name, lambda: self.job(number)["JobState"] in ENDED)
        facts = self.job(number)
        assert facts["JobState"] == state, f"{facts['JobState']}:\n{self.log(name)}"
        return facts


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, and remove it with all its processes at the end."""
    made, controller = Cluster(folder), None
    with network("petra-slurm", ADDRESSES, CONTROLLER):
        try:
            controller = made.daemon("slurmctld", "setpriv", "--pdeathsig", "KILL", "slurmctld", "-D")
            for node in ADDRESSES:
                made.start_node(node)
            made.wait_until_idle()
            yield made
        finally:
            if controller is not None:
                controller.kill()
                controller.wait()


def shipped(slurm: Cluster) -> str:
    """The job as shipped, with RevNet-34 on three nodes."""
    number = slurm.submit("shipped", "--nodes 3", (*NARROW, "model=revnet34", "data.images=80", "trainer.epochs=1"))
    slurm.until_ended(number, "shipped", "COMPLETED")
    line = "18 process(es) for the 18 stages of revnet34: 8 + 8 + 2 on 3 node(s)"
    assert slurm.log("shipped").count(line) == 1, slurm.log("shipped")
    assert slurm.summary("shipped")["processes"] == 18
    return line


def signal_before_time_limit(slurm: Cluster) -> str:
    """``--signal``: the run saves, the job joins the queue again by itself and resumes; ``scancel`` ends it with a checkpoint."""
    endless = (*RUN, "data.images=400000")
    number = slurm.submit("signal", "--time 3 --signal=USR1@110", endless, NPROC_PER_NODE="1")
    slurm.until("signal", lambda: "resuming from" in slurm.log("signal"))
    log = slurm.log("signal")
    stopped = re.findall(r"stopped on request after microbatch (\d+), checkpoint written", log)
    assert stopped == [resumed_at(log)], log
    assert "DUE TO TIME LIMIT" not in log
    time.sleep(3)
    slurm.call("scancel", number)
    slurm.until_ended(number, "signal", "CANCELLED")
    slurm.until("signal", lambda: slurm.log("signal").count("stopped on request") == 2)
    return f"saved after microbatch {stopped[0]}, requeued itself and resumed there; scancel: saved again, state CANCELLED"


def lost_node(slurm: Cluster) -> str:
    """A node loses power: its link goes down and its processes end. The job starts again on the remaining nodes."""
    with Forked(slurm.runs / "uninterrupted", RUN, 3, environment={"GLOO_SOCKET_IFNAME": "lo"}) as alone:
        assert alone.wait(PATIENCE) == [0, 0, 0], alone.output()
    expected, folder = results(slurm.runs / "uninterrupted" / "run"), slurm.runs / "lost" / "run"
    number, (_, lost, _) = slurm.submit("lost", "--requeue", RUN, NPROC_PER_NODE="2,1"), ADDRESSES
    slurm.until("lost", lambda: saved(folder))
    assert slurm.job(number)["NodeList"] == "petra-n[1-2]"
    run(f"ip -n {lost} link set eth0 down")
    end_processes(lost)
    slurm.until("lost", (folder / "summary.json").exists)
    facts = slurm.until_ended(number, "lost", "COMPLETED")
    assert facts["NodeList"] == "petra-n[1,3]", facts
    assert_undamaged(folder, expected)
    assert_same(folder, expected)
    run(f"ip -n {lost} link set eth0 up")
    slurm.start_node(lost)
    slurm.wait_until_idle()
    return f"resumed on {facts['NodeList']} after microbatch {resumed_at(slurm.log('lost'))}; equal"


def task_per_gpu(slurm: Cluster) -> str:
    """One Slurm task per GPU, each of which sees only its GPU: the command of docs/clusters.md, with four tasks."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    command = re.search(r"^srun --ntasks 16 .*?'$", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    script = command[0].replace("--ntasks 16 --ntasks-per-node 8", "--ntasks 4 --ntasks-per-node 2")
    script = script.replace("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=2").replace("exec petra", f"exec {sys.executable} -m petra")
    overrides = " ".join((*NARROW, "model=revnet18", "data.images=80", "trainer.epochs=1"))
    script = script.replace("model=revnet34 data=synthetic", overrides)
    script = script.replace("bash -c", "--nodes 2 bash -c", 1).replace(
        "'RANK", "'echo GPU $SLURM_NODEID $CUDA_VISIBLE_DEVICES; RANK", 1
    )
    place = slurm.runs / "tasks"
    place.mkdir()
    printed = slurm.call("bash", "-c", script, folder=place)
    seen = re.findall(r"^GPU (\d) (\d)$", printed, re.MULTILINE)
    assert sorted(seen) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], printed
    assert slurm.summary("tasks")["processes"] == 4
    return "4 tasks on 2 nodes, each with another visible GPU; one run of 4 processes"


SCENARIOS: dict[str, Callable[[Cluster], str]] = {
    scenario.__name__: scenario for scenario in (shipped, task_per_gpu, lost_node, signal_before_time_limit)
}


def main() -> None:
    """Run the scenarios and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME", help=", ".join(SCENARIOS))
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as running:
        print("| scenario | seconds | result |", "|---|---|---|", sep="\n", flush=True)
        for scenario in options.only:
            started = time.monotonic()
            result = SCENARIOS[scenario](running)
            print(f"| {scenario.replace('_', ' ')} | {time.monotonic() - started:.0f} | {result} |", flush=True)


if __name__ == "__main__":
    main()
