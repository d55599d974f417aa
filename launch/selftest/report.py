"""The report of a self-test in Markdown."""

from __future__ import annotations

from typing import Any

from ..run.markdown import aligned_table

COLUMNS = {
    "compare": ("run", "difference from the CPU", "repeatable bit for bit", "result"),
    "transport": ("run", "processes", "largest message (MB)", "ms per microbatch", "loss", "result"),
    "speed": ("run", "processes", "samples/s", "peak memory (GB)", "kernels per microbatch", "device busy", "result"),
}
"""Columns of the table of each kind of part."""
TITLES = {"compare": "Methods against the CPU", "transport": "Transports", "speed": "Throughput"}


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    kind = f"{found['gpus']} GPU(s)" if found["gpus"] else "no GPU"
    size = ", tiny runs" if found["tiny"] else ""
    failed = [part for part in found["parts"] if "failed" in part]
    lines = [
        f"# Self-test of petra: {kind}{size}",
        "",
        f"{len(found['parts'])} parts, {len(failed)} failed.",
        "",
        found["doctor"],
        "",
    ]
    for part, columns in COLUMNS.items():
        rows = [_row(entry) for entry in found["parts"] if entry["part"] == part]
        if rows:
            lines += [f"## {TITLES[part]}", "", aligned_table(columns, rows), ""]
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> list[str]:
    result = "passed"
    if "failed" in entry or "left_out" in entry:
        result = f"failed: {entry['failed']}" if "failed" in entry else f"left out: {entry['left_out']}"
    if entry["part"] == "compare":
        return [entry["name"], _number(entry, "difference", "{:.1e}"), str(entry.get("repeatable", "")).lower(), result]
    if entry["part"] == "transport":
        message, time = _number(entry, "message_bytes", "{:.1f}", 1e-6), _number(entry, "seconds", "{:.1f}", 1e3)
        return [entry["name"], str(entry["processes"]), message, time, _number(entry, "loss"), result]
    peak = f"{max(entry['peak_bytes']) / 1e9:.2f}" if "peak_bytes" in entry else ""
    kernels, busy = _number(entry, "kernels_per_microbatch", "{:.0f}"), _number(entry, "device_busy", "{:.0%}")
    return [entry["name"], str(entry["processes"]), _number(entry, "samples_per_second", "{:.0f}"), peak, kernels, busy, result]


def _number(entry: dict[str, Any], key: str, form: str = "{:.4f}", unit: float = 1.0) -> str:
    return form.format(unit * entry[key]) if key in entry else ""
