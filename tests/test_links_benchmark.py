"""The benchmark of fewer bytes: its networks and bytes, and the table and picture of made records."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links import figures
from benchmarks.links.cells import CELLS, LinkCell, bytes_per_token
from benchmarks.records import RECORDS


def test_narrow_networks_have_the_parameters_of_the_full_ones() -> None:
    networks = {(cell.model, cell.stream): cell for cell in CELLS}
    sizes = {key: sum(p.numel() for p in cell.make_model().build_block(1, 0).parameters()) for key, cell in networks.items()}
    for (model, stream), size in sizes.items():
        full = sizes["revgpt_2m" if model.endswith("_2m") else "revgpt", None]
        assert size == pytest.approx(full, rel=0.002), (model, stream)
    assert len(sizes) == 8
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_bytes_are_those_of_the_streams_and_of_all_that_travels_with_them() -> None:
    """With 256 tokens per message, a report of three numbers takes a quarter of a byte."""
    for cell, expected in (
        (LinkCell("dsp", 8, "muon", stream=14, x="int4_token", delta="int8_token"), (14 + 4 + 4, 28 + 4 + 0.25)),
        (LinkCell("petra", 8, "muon", x="int8", delta="int4"), (112 + 1 + 0.5, 112 + 56 + 1.25)),
    ):
        assert bytes_per_token(cell) == pytest.approx(expected, abs=0.01), cell.name


def test_the_table_is_that_of_the_records() -> None:
    records = figures.read_all([RECORDS / f"{name}.jsonl" for name in ("links", "staleness")])
    page = (RECORDS.parent / "links.md").read_text(encoding="utf-8")
    assert figures.table(figures.points(records)) in page


def record(cell: Any, seed: int, bits: float, rate: float = 0.008) -> dict[str, Any]:
    parts = {"val": bits} | ({} if seed == 100 else {"test": bits})
    return {"cell": cell.name, "seed": seed, "rate": rate, "warmup": 0.1, "updates": 256, "bits_per_byte": parts}


def test_points_compare_the_same_seeds_and_the_table_states_goals(tmp_path: Path) -> None:
    cell = next(cell for cell in CELLS if cell.name == "j16_dsp_k8_muon_s14")
    single = next(cell for cell in CELLS if cell.x == "int8_token" and cell.stream is None and cell.method == "dsp")
    records = [record(cell.baseline, seed, 2.0 + seed / 100) for seed in range(3)]
    records += [record(cell, seed, 2.03 + seed / 100 + 0.01 * (seed == 1)) for seed in (0, 1)]
    records += [record(cell, 100, 2.1), record(cell, 100, 2.5, rate=0.004), record(single, 2, 2.2)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"name": str(i), **r}) + "\n" for i, r in enumerate(records)))
    first, second = figures.points(figures.read_all([tmp_path / "records.jsonl"]))
    assert (first.cell, first.seeds, first.searched, second.half, second.searched) == (cell, 2, True, None, False)
    assert first.above == pytest.approx(0.035)
    assert first.half == pytest.approx(12.706 * 0.005, rel=1e-4)
    assert first.less == pytest.approx(896.25 / 116)
    assert second.ratio == pytest.approx(2.2 / 2.02)
    assert "| 0.035 ± 0.064 | 1.017 |" in figures.table([first, second])
    assert "| 0.180 | 1.089 |" in figures.table([first, second])
    figures.draw([first, second], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
