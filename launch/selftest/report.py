"""The report of a self-test in Markdown."""

from __future__ import annotations

from typing import Any

from ..run.markdown import aligned_table

TITLES = {"compare": "Methods against the CPU", "transport": "Transports", "memory": "Memory", "speed": "Throughput"}
EXPLANATIONS = {
    "compare": "Largest difference of weights after three updates in float32, relative to the largest weight of a tensor, in one "
    "process. Rounding differs between devices, so 1e-3 is accepted.",
    "transport": "Training in several processes, twice. The digest is of all weights: it is equal for runs with the same d.",
    "memory": "Peak of torch's allocator in one process with four stages, and `dry_run=memory` without workspaces. The peak of a "
    "CPU is not known.",
    "speed": "k = 4. Samples are images, or windows of tokens for revgpt. Peak memory is the largest of all processes: of torch's "
    "allocator on GPUs, resident memory on CPUs. The last columns are of the first process, as fractions of the time: kernels of "
    "the GPU besides NCCL's, NCCL's kernels (with waiting for other processes), and calls of the host that launch kernels. Much "
    "time in launches means that the GPU waits for Python. These columns are empty without a GPU.",
}
"""What the columns of a table mean."""


SHARES = ("kernels_per_microbatch", "device_busy", "communication", "launching")
COLUMNS = {
    "compare": ("difference", "repeatable"),
    "transport": ("processes", "message_bytes", "seconds_per_microbatch", "loss", "digest", "repeatable"),
    "memory": ("peak_bytes", "predicted_bytes", "predicted_over_peak"),
    "speed": ("processes", "samples_per_second", "peak_bytes", *SHARES),
}
"""Findings of each kind of part that are columns of its table, between the name of the run and its result."""


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    kind = f"{found['gpus']} GPU(s)" if found["gpus"] else "no GPU"
    parts = found["parts"]
    failed, left_out = ([part["name"] for part in parts if key in part] for key in ("failed", "left_out"))
    seconds = sum(part.get("duration", 0.0) for part in parts)
    lines = [
        f"# Self-test of petra: {kind}{', tiny runs' if found['tiny'] else ''}",
        "",
        f"{len(parts) - len(failed) - len(left_out)} of {len(parts)} parts passed, in {seconds:.0f} s.",
        *([f"Failed: {'; '.join(failed)}."] if failed else []),
        *([f"No time was left for: {'; '.join(left_out)}."] if left_out else []),
        "",
        "To report a problem, attach this file and selftest.json, which has the options of each part.",
        "",
        "## Machine",
        "",
        found["doctor"],
        "",
    ]
    for part, columns in COLUMNS.items():
        entries = [entry for entry in parts if entry["part"] == part]
        if entries:
            titles = [key.replace("_bytes", " (MB)").replace("_", " ") for key in columns]
            rows = [[entry["name"], *(_cell(key, entry.get(key)) for key in columns), _result(entry)] for entry in entries]
            lines += [f"## {TITLES[part]}", "", EXPLANATIONS[part], "", aligned_table(("run", *titles, "result"), rows), ""]
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    """Return a finding as text, empty if there is none. Of a list, the largest counts."""
    if isinstance(value, list):
        value = max(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is not None and key.endswith("_bytes"):
        return f"{value / 1e6:.1f}"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _result(entry: dict[str, Any]) -> str:
    return f"failed: {entry['failed']}" if "failed" in entry else "left out" if "left_out" in entry else "passed"
