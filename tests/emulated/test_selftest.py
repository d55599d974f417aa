"""Parts of ``petra selftest`` on emulated devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.selftest.command import Run, judge, plan
from launch.selftest.report import markdown
from tests.emulated.test_paths import launched

pytestmark = pytest.mark.emulated

NAMES = ("petra against the CPU", "lockstep, d = 2", "edge, d = 1", "memory of petra", "revnet18, batch 4, 1f1b")


def findings(run: Run, folder: Path) -> dict[str, Any]:
    out = folder / "found.json"
    launched("launch.selftest.parts", folder, run.part, json.dumps(run.options), str(out), world=run.processes)
    return json.loads(out.read_text())


def test_tiny_parts_pass_and_make_a_report(tmp_path: Path) -> None:
    runs = {run.name: run for run in plan(2, tiny=True)}
    parts = []
    for run in (runs[name] for name in NAMES):
        assert run.options["device"] == "cuda"
        found = findings(run, tmp_path)
        assert judge(run.part, found) == {}
        parts.append({"part": run.part, "name": run.name, **run.options, "processes": run.processes, **found})
    compare, lockstep, edge, memory, speed = parts
    assert compare["difference"] == 0
    assert (lockstep["transport"], edge["transport"]) == ("lockstep", "edge")
    assert lockstep["digest"] != edge["digest"]  # of different delays
    assert memory["predicted_bytes"] == pytest.approx(memory["peak_bytes"], rel=0.05)
    assert len(speed["peak_bytes"]) == 2
    text = markdown({"gpus": 2, "tiny": True, "doctor": "No problems found.", "parts": parts})
    assert f"{len(NAMES)} of {len(NAMES)} parts passed" in text
    assert text.count("| passed |") == len(NAMES)
