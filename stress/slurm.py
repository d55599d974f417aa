"""A Slurm cluster of several nodes on one machine: each node has a network namespace, a host name and a slurmd of its own.

Needs Linux, root, and Debian's packages: ``apt-get install slurmctld slurmd slurm-client iproute2``. Authentication is off
(``auth/none``), so that no further service is needed. The nodes share this machine's files.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stress.locks import only_one

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "ip", "unshare", "setpriv")
PREFIX, BRIDGE, NETWORK, CONTROLLER = "petra-n", "petra-slurm", "10.97.0", "10.97.0.254"
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
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
        _run(f"ip -n {node} link set eth0 down")
        _end_processes(node)

    def repair_node(self, node: str) -> None:
        """Start a lost node again, and wait until Slurm uses it."""
        _run(f"ip -n {node} link set eth0 up")
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
def cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Start a cluster, and remove it with all its processes at the end.

    If another process of this machine runs such a cluster, wait for its end: both would have the same names and addresses.

    Raises:
        AssertionError: If the nodes are not idle in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = Cluster(folder, tuple(f"{PREFIX}{i}" for i in range(1, nodes + 1)))
    controller = None
    with only_one("petra-slurm"):
        _remove_network(result.nodes)  # of a cluster that was killed
        try:
            _make_network(result.nodes)
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
            _remove_network(result.nodes)


def _end_processes(node: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout.split()
    if pids:
        subprocess.run(["kill", "-9", *pids], stderr=subprocess.DEVNULL)


def _make_network(nodes: Sequence[str]) -> None:
    """Create the namespaces, and join them to a bridge. A node finds the others by their names."""
    hosts = "127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{i} {node}\n" for i, node in enumerate(nodes, 1))
    _run(f"ip link add {BRIDGE} type bridge")
    _run(f"ip address add {CONTROLLER}/24 dev {BRIDGE}")
    _run(f"ip link set {BRIDGE} up")
    for i, node in enumerate(nodes, 1):
        place = Path("/etc/netns", node)  # `ip netns exec` mounts this folder's files over those of /etc
        place.mkdir(parents=True, exist_ok=True)
        (place / "hosts").write_text(hosts)
        _run(f"ip netns add {node}")
        _run(f"ip link add {node} type veth peer name eth0 netns {node}")
        _run(f"ip link set {node} master {BRIDGE} up")
        _run(f"ip -n {node} address add {NETWORK}.{i}/24 dev eth0")
        for link in ("lo", "eth0"):
            _run(f"ip -n {node} link set {link} up")


def _remove_network(nodes: Sequence[str]) -> None:
    for node in nodes:
        _end_processes(node)
        subprocess.run(["ip", "netns", "delete", node], stderr=subprocess.DEVNULL)
        shutil.rmtree(Path("/etc/netns", node), ignore_errors=True)
    subprocess.run(["ip", "link", "delete", BRIDGE], stderr=subprocess.DEVNULL)


def _configure(wanted: Cluster) -> None:
    lines = [CONFIGURATION.format(host=socket.gethostname(), controller=CONTROLLER, folder=wanted.folder)]
    for i, node in enumerate(wanted.nodes, 1):
        lines.append(f"NodeName={node} NodeAddr={NETWORK}.{i} CPUs=16 Gres=gpu:{GPUS}\n")
        (wanted.folder / f"spool-{node}").mkdir()
    (wanted.folder / "state").mkdir()
    (wanted.folder / "slurm.conf").write_text("".join(lines))
    (wanted.folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\n"
    )  # is not used; its detection needs a mounted /sys/fs/cgroup
    for gpu in range(GPUS):  # a GPU is a file of the kind of /dev/null here
        os.mknod(wanted.folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (wanted.folder / "gres.conf").write_text(f"Name=gpu File={wanted.folder}/gpu[0-{GPUS - 1}]\n")


def _daemon(words: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("a") as log:
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True)
