"""Draw the schedule of a method without running it: the drawings of docs/concepts.md.

python -m docs.schedules --method petra --stages 4 --microbatches 12 --out petra.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from petra.analysis.plots import save, timeline
from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import PREDICTED
from petra.cost_model.simulator import predict, simulate
from petra.errors import PetraError, require
from petra.method import Keep


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the schedule of a method for stages of equal cost: a forward takes 1, a backward 2 if graphs are stored, else 3."""
    options = _parser().parse_args(arguments)
    method = PREDICTED[options.method]
    costs = [StageCost(1.0, 2.0 if method.keep is Keep.GRAPH else 3.0, weights=1.0)] * options.stages
    try:
        for name in ("stages", "k", "microbatches"):
            require(getattr(options, name) >= 1, f"--{name}", "an integer >= 1", getattr(options, name))
        if options.delay is not None:
            method = replace(method, delay=options.delay)
        intervals = simulate(costs, method, options.k, options.microbatches)
        steady = predict(costs, method, options.k)
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    name = method.name if options.delay is None else f"{method.name} with d = {options.delay}"
    title = f"{name}, {options.stages} stages: period {steady.period:g}, idle {sum(steady.bubble) / options.stages:.0%}"
    save(timeline(intervals, title, "units of time"), options.out)
    print(f"{title}; {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=PREDICTED, default="petra")
    parser.add_argument("--delay", type=int, help="delay d of every boundary (default: the method's own)")
    parser.add_argument("--stages", type=int, default=4, help="number of stages")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=12, help="number of microbatches")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"), help="PNG, SVG or PDF file")
    return parser


if __name__ == "__main__":
    main()
