"""Print how much the weights of runs on emulated GPUs differ from those on the CPU: ``python -m tests.emulated``."""

from launch.runtime.terminal import table
from tests.emulated.test_training import CASES, WAYS, difference

if __name__ == "__main__":
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in CASES:
        cells = [f"{found:.0e}" if (found := difference(name, way)) else "equal" for way in WAYS]
        groups.setdefault((*cells,), []).append(name)
    print(table(("runs", *WAYS), [(", ".join(names), *cells) for cells, names in groups.items()]))
