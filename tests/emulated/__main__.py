"""Print how much the weights of runs on emulated GPUs differ from those on the CPU: ``python -m tests.emulated``."""

from launch.run.markdown import table
from tests.emulated.test_training import CASES, WAYS, difference

if __name__ == "__main__":
    rows = [(name, *(f"{found:.0e}" if (found := difference(name, way)) else "equal" for way in WAYS)) for name in CASES]
    print(table(("run", *WAYS), rows))
