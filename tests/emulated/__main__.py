"""Run a script or a module on the emulated device: ``python -m tests.emulated [--devices N] [--seed S] SCRIPT | -m MODULE ...``.

Processes that the script starts have the emulated device, too. At the end, the synchronizations with the host are printed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from dataclasses import fields
from pathlib import Path

from tests.emulated import device

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Parse options, install the emulated device and run the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulated", description=__doc__)
    defaults = device.Options()
    for each in fields(defaults):
        default = getattr(defaults, each.name)
        flag = f"--{each.name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, metavar=str(default) or "KIND")
    parser.add_argument("--report", action="store_true", help="print the synchronizations with the host at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args()
    options = device.Options(**{each.name: getattr(parsed, each.name) for each in fields(defaults)})
    paths = [str(ROOT / "tests/emulated/site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(options.environment(), PYTHONPATH=os.pathsep.join(paths))
    device.install(options)
    sys.argv = [parsed.program, *parsed.arguments]
    try:
        if parsed.module:
            runpy.run_module(parsed.program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(parsed.program).parent))
            runpy.run_path(parsed.program, run_name="__main__")
    finally:
        if parsed.report:
            for sync, count in sorted(device.report.syncs.items()):
                print(f"{count:6} {sync.kind:12} {sync.what:40} {sync.place}")


if __name__ == "__main__":
    main()
