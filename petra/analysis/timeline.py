"""Timelines of recorded and of simulated runs: a trace for Perfetto or chrome://tracing, and a picture.

The picture of a schedule without running it::

    python -m petra.analysis.timeline --method petra --stages 4 --microbatches 12 --out petra.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from petra.analysis.plots import timeline
from petra.cost_model.simulator import Link, StageCost, predict, simulate
from petra.diagnostics.events import Interval, Kind
from petra.errors import ConfigError, PetraError
from petra.method import METHODS, Keep


def write_trace(intervals: Sequence[Interval], path: Path) -> None:
    """Writes all stages into one file of Chrome's trace format (times in µs); arrows lead from each send to its receive."""
    origin = min((i.start for i in intervals), default=0.0)
    events: list[dict[str, object]] = []
    for stage in sorted({i.stage for i in intervals}):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage + 1}"}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": stage, "args": {"sort_index": stage}})
    numbers: dict[tuple[int, int, int], int] = {}
    for i in sorted(intervals, key=lambda i: i.start):
        at = {"pid": 0, "tid": i.stage, "ts": 1e6 * (i.start - origin)}
        name = f"{i.kind}{i.microbatch}" if i.kind in (Kind.FORWARD, Kind.BACKWARD) else str(i.kind)
        arguments = {"microbatch": i.microbatch}
        events.append({"name": name, "cat": str(i.kind), "ph": "X", "dur": 1e6 * (i.stop - i.start), "args": arguments, **at})
        if i.peer is not None and i.kind in (Kind.SEND, Kind.RECEIVE):
            sends = i.kind is Kind.SEND
            route = (i.stage, i.peer, i.microbatch) if sends else (i.peer, i.stage, i.microbatch)
            number = numbers.setdefault(route, len(numbers))
            end = {} if sends else {"bp": "e"}
            events.append({"name": "message", "cat": "message", "ph": "s" if sends else "f", "id": number, **end, **at})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def write_timeline(intervals: Sequence[Interval], folder: Path, title: str) -> None:
    """Writes trace.json, timeline.png and timeline.svg."""
    write_trace(intervals, folder / "trace.json")
    timeline(intervals, [folder / "timeline.png", folder / "timeline.svg"], title)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the schedule of a method for stages of equal cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="petra")
    parser.add_argument("--delay", type=int, help="d at every boundary; the method's own if not given")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--forward", type=float, default=1.0, help="units of time of a forward")
    parser.add_argument("--backward", type=float, help="of a backward; 2 if the graph is kept, else 3 forwards")
    parser.add_argument("--latency", type=float, default=0.0, help="units of time that a message travels")
    parser.add_argument("--transport", choices=("edge", "lockstep"), default="edge")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"), help="PNG, SVG or PDF to draw, or .json for a trace")
    options = parser.parse_args(arguments)
    method = METHODS[options.method]
    backward = options.backward or options.forward * (2 if method.keep is Keep.GRAPH else 3)
    costs = [StageCost(options.forward, backward)] * options.stages
    link = Link(latency=options.latency)
    try:
        for name in ("stages", "k", "microbatches"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name}: found {getattr(options, name)}, accepted are integers >= 1")
        if options.delay is not None:
            method = replace(method, delay=options.delay)
        found = simulate(costs, method, options.k, options.microbatches, link=link, transport=options.transport)
        steady = predict(costs, method, options.k, link=link, transport=options.transport)
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    name = method.name if options.delay is None else f"{method.name} with d = {options.delay}"
    title = f"{name}, {options.stages} stages: period {steady.period:g}, idle {sum(steady.bubble) / options.stages:.0%}"
    if options.out.suffix == ".json":
        write_trace(found, options.out)
    else:
        timeline(found, [options.out], title, "units of time")
    print(f"{title}; {options.out}")


if __name__ == "__main__":
    main()
