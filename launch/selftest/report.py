"""The report of a self-test in Markdown."""

from __future__ import annotations

from typing import Any

from ..run.markdown import aligned_table

TITLES = {"compare": "Methods against the CPU", "transport": "Transports", "memory": "Memory", "speed": "Throughput"}
COLUMNS = {
    "compare": ("run", "difference from the CPU", "repeatable bit for bit", "result"),
    "transport": ("run", "processes", "largest message (MB)", "ms per microbatch", "loss", "digest", "repeatable", "result"),
    "memory": ("run", "peak (MB)", "predicted (MB)", "predicted / peak", "result"),
    "speed": (
        *("run", "processes", "samples/s", "peak memory (GB)", "kernels per microbatch", "kernels' time", "NCCL's time"),
        *("launching", "result"),
    ),
}
"""Columns of the table of each kind of part."""
EXPLANATIONS = {
    "compare": "Largest difference of weights after three updates in float32, relative to the largest weight of a tensor, in one "
    "process. Rounding differs between devices, so 1e-3 is accepted.",
    "transport": "Training in several processes, twice. The digest is of all weights: it is equal for runs with the same d.",
    "memory": "Peak of torch's allocator in one process with four stages, and `dry_run=memory` without workspaces. The peak of a "
    "CPU is not known.",
    "speed": "k = 4. Samples are images, or windows of tokens for revgpt. Peak memory is the largest of all processes. The last "
    "columns are of the first process, as fractions of the time: kernels of the GPU besides NCCL's, NCCL's kernels (with waiting "
    "for other processes), and calls of the host that launch kernels. Much time in launches means that the GPU waits for Python.",
}
"""What the columns of a table mean."""


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    kind = f"{found['gpus']} GPU(s)" if found["gpus"] else "no GPU"
    size = ", tiny runs" if found["tiny"] else ""
    parts = found["parts"]
    failed = [part["name"] for part in parts if "failed" in part]
    left_out = [part["name"] for part in parts if "left_out" in part]
    seconds = sum(part.get("duration", 0.0) for part in parts)
    lines = [
        f"# Self-test of petra: {kind}{size}",
        "",
        f"{len(parts) - len(failed) - len(left_out)} of {len(parts)} parts passed, in {seconds:.0f} s.",
        *([f"Failed: {'; '.join(failed)}."] if failed else []),
        *([f"No time was left for: {'; '.join(left_out)}."] if left_out else []),
        "",
        "## Machine",
        "",
        found["doctor"],
        "",
    ]
    for part, columns in COLUMNS.items():
        rows = [_row(entry) for entry in parts if entry["part"] == part]
        if rows:
            lines += [f"## {TITLES[part]}", "", EXPLANATIONS[part], "", aligned_table(columns, rows), ""]
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> list[str]:
    result = "passed"
    if "failed" in entry or "left_out" in entry:
        result = f"failed: {entry['failed']}" if "failed" in entry else "left out"
    return [entry["name"], *_CELLS[entry["part"]](entry), result]


def _compare(entry: dict[str, Any]) -> list[str]:
    return [_number(entry, "difference", "{:.1e}"), _yes_no(entry, "repeatable")]


def _transport(entry: dict[str, Any]) -> list[str]:
    message, time = _number(entry, "message_bytes", "{:.1f}", 1e-6), _number(entry, "seconds", "{:.1f}", 1e3)
    return [str(entry["processes"]), message, time, _number(entry, "loss"), entry.get("digest", ""), _yes_no(entry, "repeatable")]


def _memory(entry: dict[str, Any]) -> list[str]:
    peak, predicted = entry.get("peak_bytes"), entry.get("predicted_bytes")
    ratio = f"{predicted / peak:.3f}" if peak and predicted else ""
    return [*("" if size is None else f"{size / 1e6:.1f}" for size in (peak, predicted)), ratio]


def _speed(entry: dict[str, Any]) -> list[str]:
    peak = f"{max(entry['peak_bytes']) / 1e9:.2f}" if "peak_bytes" in entry else ""
    parts = [_number(entry, key, "{:.0%}") for key in ("device_busy", "communication", "launching")]
    kernels = _number(entry, "kernels_per_microbatch", "{:.0f}")
    return [str(entry["processes"]), _number(entry, "samples_per_second", "{:.0f}"), peak, kernels, *parts]


_CELLS = {"compare": _compare, "transport": _transport, "memory": _memory, "speed": _speed}


def _yes_no(entry: dict[str, Any], key: str) -> str:
    return ("yes" if entry[key] else "no") if key in entry else ""


def _number(entry: dict[str, Any], key: str, form: str = "{:.4f}", unit: float = 1.0) -> str:
    return form.format(unit * entry[key]) if key in entry else ""
