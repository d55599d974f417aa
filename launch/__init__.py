"""Commands. In a checkout, this package is ``launch``; a wheel contains it as ``petra.launch``."""

import sys

if sys.argv[0] == "-m":  # python -m imports the package of a module before the module
    started = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    if started.removeprefix(f"{__name__}.") not in ("train", "bench.measure"):
        print(
            f"error: command line: expected python -m petra COMMAND, got python -m {started}, which starts nothing", file=sys.stderr
        )
        sys.exit(2)
