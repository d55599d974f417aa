"""Run the long tests one after the other: ``python -m stress [--only NAME ...] [--golden COMMIT]``, or ``make stress``.

Prints a line for each with its minutes and how it ended, and the output of those that fail. Exits with status 1 if one failed.
Programs that need root, iproute2 or Slurm are skipped where these are missing.
"""

import os
import shutil
import subprocess
import sys
import time

from stress.frame import parser_of
from tests.structure import ROOT
from tests.support.processes import environment

PROGRAMS = {
    "emulated": "-m pytest -q tests/emulated",
    "faults": "-m stress.faults --count 40",
    "kills": "-m stress.kill_many --kills 100 --torchrun 5",
    "agents": "-m stress.kill_many --kills 0 --torchrun 5 --agents 2",
    "replicas": "-m stress.kill_replicas --kills 30 --processes 4",
    "divided": "-m stress.kill_divided --kills 6",
    "soak": "-m stress.soak --microbatches 20000",
    "soak_edge": "-m stress.soak --microbatches 20000 --transport edge",
    "configurations": "-m pytest -q --hypothesis-profile=long --timeout 0 tests/launch/test_fuzz_configs.py",
    "damage": "-m pytest -q --hypothesis-profile=long tests/training/test_damaged_checkpoints.py tests/data/test_imagenet.py",
    "hosts": "-m stress.two_hosts",
    "slurm": "-m stress.slurm",
    "silent_commands": "-m stress.silent_commands",
    "silent_library": "-m stress.silent_library",
    "silent_blocks": "-m stress.silent_blocks",
    "silent_data": "-m stress.silent_data",
    "silent_delay": "-m stress.silent_delay",
}
"""Arguments of Python by name of the test."""


def obstacle(name: str) -> str | None:
    """Return why a program can't run here, or None."""
    if name == "hosts" and (os.geteuid() != 0 or shutil.which("ip") is None):
        return "needs root and iproute2"
    if name == "slurm":
        from stress.slurm import missing

        return missing()
    return None


def run(name: str, arguments: str) -> bool:
    """Run a program, print how it ended, and return whether it succeeded or was skipped."""
    if (missing := obstacle(name)) is not None:
        print(f"{name}: skipped, {missing}", flush=True)
        return True
    begun, pipes = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [sys.executable, *arguments.split()]
    done = subprocess.run(words, cwd=ROOT, env=environment(PETRA_STRESS="1"), text=True, **pipes)  # type: ignore[call-overload]
    last = (done.stdout.splitlines() or [""])[-1]
    minutes = (time.monotonic() - begun) / 60
    print(f"{name}: {f'status {done.returncode}' if done.returncode else 'passed'}, {minutes:.1f} min; {last}", flush=True)
    if done.returncode:
        print(done.stdout, flush=True)
    return done.returncode == 0


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=PROGRAMS, default=[*PROGRAMS], help=", ".join(PROGRAMS))
    parser.add_argument("--golden", metavar="COMMIT", help="also compare weights with those of a commit (tests.golden)")
    options = parser.parse_args()
    chosen = {name: PROGRAMS[name] for name in options.only}
    if options.golden:
        chosen["golden"] = f"-m tests.golden --against {options.golden}"
    failed = [name for name, arguments in chosen.items() if not run(name, arguments)]
    print(f"{len(chosen)} programs, failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
