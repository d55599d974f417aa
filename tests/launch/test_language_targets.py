"""Targets about language models: tables from finished runs, the formula of memory against the engine, simulated speeds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.reproduce import language, language_cost
from launch.reproduce.language import SETTINGS, Setting
from launch.reproduce.language_cost import SCHEDULES, formula, stage_costs, tokens_per_second
from launch.reproduce.report import Request, Scale
from petra.cost_model.memory import predict_memory
from petra.method import METHODS, Keep, Weights
from petra.model import Model
from petra.models import MODELS
from petra.plan.plan import make_plan
from petra.specs import TensorSpec
from tests.launch.test_reproduce import config_of, request, write_run

PETRA, EXACT = "petra, d = 1, small microbatches", "backprop"
WIDTH, CONTEXT, WORDS, LAYERS = 32, 16, 64, 2


def tiny(name: str, depth: int | None = None) -> Model:
    modern = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True}
    shape = {"dim": WIDTH, "heads": 4, "hidden": 64, "size": CONTEXT}
    return MODELS[name](WORDS, depth=depth or LAYERS, **shape, **modern)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_cost, "language_model", tiny)
    monkeypatch.setattr(language_cost, "CONTEXT", CONTEXT)
    monkeypatch.setattr(language_cost, "DEVICES", (4,))
    monkeypatch.setattr(language_cost, "SIMULATED", (2, 4))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "SETTINGS", {name: SETTINGS[name] for name in (EXACT, PETRA)})
    monkeypatch.setattr(language, "FINALISTS", (EXACT, PETRA))
    monkeypatch.setattr(language, "LONGEST", (EXACT, PETRA))
    monkeypatch.setattr(language, "STAGES", (8,))
    monkeypatch.setattr(language, "SEEDS", (0, 1))


def finished(folder: Path, overrides: tuple[str, ...], test_loss: float, losses: list[float]) -> None:
    """Write a run with these training losses at equal distances over 128 updates."""
    write_run(folder, config_of(*overrides), 0.1, test_loss=test_loss)
    updates = [128 * (i + 1) // len(losses) for i in range(len(losses))]
    rows = [{"microbatches": 8 * n, "updates": n, "update/loss": loss} for n, loss in zip(updates, losses, strict=True)]
    rows[0]["update/weight_drift"], rows[-1]["update/weight_drift"] = 0.03, 0.01
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def final(folder: Path, name: str, rate: str, losses: list[float], test_loss: float, seed: int = 0, *more: str) -> Path:
    """Write a run of ``lm-parity``."""
    limit = f"trainer.limit_batches={768 * SETTINGS[name].microbatches(8)}"
    folder = folder / f"final {name} {rate} {seed}"
    overrides = (*SETTINGS[name].arguments(8, rate), limit, f"seed={seed}", "trainer.diagnose=203", *more)
    finished(folder, overrides, test_loss, losses)
    return folder


def diagnosed(folder: Path, cosines: dict[int, tuple[float, float]]) -> None:
    """Write the cosines of stages 1 and 2 by microbatch, of the 100 microbatches of a run."""
    rows = [
        {"microbatch": m, "stage": j + 1, "cosine_end_to_end": cosine, "reconstruction_error": 0.0}
        for m, found in cosines.items()
        for j, cosine in enumerate(found)
    ]
    (folder / "gradients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def searched(folder: Path) -> None:
    falling = [8.0, 7.0, 6.0, 5.0]
    runs = {
        (EXACT, "3e-3"): (5.0, falling),
        (EXACT, "6e-3"): (5.5, falling),
        (PETRA, "1.5e-3"): (5.2, [7.5, 6.5, 5.0, 4.5]),
        (PETRA, "3e-3"): (6.0, falling),
    }
    for (name, rate), (loss, losses) in runs.items():
        limit = f"trainer.limit_batches={128 * SETTINGS[name].microbatches(8)}"
        finished(folder / f"{name}{rate}", (*SETTINGS[name].arguments(8, rate), limit), loss, losses)


def test_every_setting_has_the_same_tokens_per_update() -> None:
    for name, setting in SETTINGS.items():
        for stages in language.STAGES:
            config = config_of(*setting.arguments(stages, "3e-3"))
            assert config["k"] * config["data"]["batch_size"] * config["data"]["size"] == language.TOKENS, name
            assert config["trainer"]["stages"] == stages
    assert Setting((), 4).microbatches(16) == 4
    assert Setting(()).microbatches(16) == 16


def test_tables_of_search_and_finals(tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    searched(tmp_path / "given")
    request(tmp_path / "out", "lm-search", "--gather", "--runs", str(tmp_path / "given"))
    text = capsys.readouterr().out
    assert "| 8 | backprop | `method=backprop k=8` |  |  | 5.0000 | 5.5000 |  |  | 3e-3 |" in text
    assert f"| 8 | {PETRA} | `method=petra method.delay=1 k=16` |  | 5.2000 | 6.0000 |  |  |  | 1.5e-3 |" in text
    assert "4 of 12 runs finished." in text
    final(tmp_path / "given", PETRA, "1.5e-3", [6.0, 5.0], 4.5)
    for name, rate, losses in ((EXACT, "3e-3", (4.0, 4.2)), (PETRA, "7.5e-4", (4.1, 4.141))):
        for seed, loss in enumerate(losses):
            folder = final(tmp_path / "given", name, rate, [6.0, 5.0], loss, seed)
            if name == PETRA:
                diagnosed(folder, {10: (0.1, 0.2), 60: (0.9, 0.8), 90: (0.7, 0.6)})
    request(tmp_path / "out", "lm-parity", "--gather", "--runs", str(tmp_path / "given"))
    text = capsys.readouterr().out
    assert "| 8 | backprop | 3e-3 | 4.1000 ± 0.1414 |  |  |  | 2.00 |  |  | 2 |" in text
    assert f"| 8 | {PETRA} | 7.5e-4 | 4.1205 ± 0.0290 |  | 0.50 |  | 2.00 | 0.800 | 0.700 | 2 |" in text
    assert "runs finished" not in text
    shutil.rmtree(tmp_path / "given" / f"final {PETRA} 7.5e-4 1")
    request(tmp_path / "out", "lm-parity", "--gather", "--runs", str(tmp_path / "given"))
    assert "| 4.1000 |  | 2.50 |  | 2.00 | 0.800 | 0.700 | 1 |" in capsys.readouterr().out  # above backpropagation with seed 0
    assert (tmp_path / "out" / "lm-parity.png").exists()


def test_table_of_embeddings(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(language, "EXACT_MUON", EXACT)
    monkeypatch.setattr(language, "FRESH_FEEDBACK", PETRA)
    monkeypatch.setattr(language, "STD_RATE", "3e-3")
    for std, exact, stale, cosine in (("0.02", 4.0, 4.1, 0.7), ("1.0", 4.0, 4.02, 0.9)):
        for name, loss in ((EXACT, exact), (PETRA, stale)):
            folder = final(tmp_path / "given" / std, name, "3e-3", [6.0, 5.0], loss, 0, f"model.embedding_std={std}")
            if name == PETRA:
                diagnosed(folder, {60: (cosine, 1.0)})
    folders = (str(tmp_path / "given" / std) for std in ("0.02", "1.0"))
    request(tmp_path / "out", "lm-embedding", "--gather", "--runs", *folders)
    text = capsys.readouterr().out
    assert f"| 0.02 | 8 | {PETRA} | 4.1000 |  | 2.50 |  | 2.00 | 0.700 | 0.700 |" in text
    assert f"| 1.0 | 8 | {PETRA} | 4.0200 |  | 0.50 |  | 2.00 | 0.900 | 0.900 |" in text
    assert "4 of 8 runs finished." in text


def test_table_of_longer_runs(tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    searched(tmp_path / "given")
    for name, rate, loss in ((EXACT, "3e-3", 3.0), (PETRA, "1.5e-3", 3.03)):
        final(tmp_path / "given", name, rate, [6.0, 5.0], 4.0)
        overrides = (*SETTINGS[name].arguments(8, rate), "trainer.epochs=2", "trainer.diagnose=203")
        finished(tmp_path / "given" / name, overrides, loss, [4.0, 3.0])
    request(tmp_path / "out", "lm-long", "--gather", "--runs", str(tmp_path / "given"))
    text = capsys.readouterr().out
    assert "| backprop | 3e-3 | 3.0000 |  |  |  | 2.00 |  |  |" in text
    assert f"| {PETRA} | 1.5e-3 | 3.0300 |  | 1.00 |  | 2.00 |  |  |" in text


def test_time_to_a_loss_uses_the_tokens_of_the_runs(
    tmp_path: Path, few: None, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Backpropagation ends at a training loss of 5 after four parts; PETRA's third part is at 5. There are no longer runs."""
    searched(tmp_path / "given")
    request(tmp_path / "out", "lm-time", "--gather", "--runs", str(tmp_path / "given"))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 300 |")]
    by_name = {row[1]: row for row in rows}
    assert by_name["1F1B"][4:6] == [EXACT, "1.00"]
    assert by_name["PETRA, d = 1"][4:6] == [PETRA, "0.75"]
    ratio = float(by_name["1F1B"][2]) / float(by_name["PETRA, d = 1"][2])
    assert float(by_name["PETRA, d = 1"][6]) == pytest.approx(0.75 * ratio, rel=0.02)
    assert by_name["PETRA"][4] == ""  # no finished run


def test_time_to_a_loss_uses_the_longer_runs_if_there_are_some(tmp_path: Path, few: None) -> None:
    """Backpropagation is within 1 % of its last loss after three quarters of its run, PETRA at its end."""
    searched(tmp_path)
    for name, rate, losses in ((EXACT, "3e-3", [5.0, 4.5, 4.04, 4.0]), (PETRA, "1.5e-3", [5.0, 4.5, 4.1, 4.03])):
        final(tmp_path, name, rate, losses, losses[-1])
    found = language.reached(Request(Scale.CPU, tmp_path / "out", folders=(tmp_path,)))
    assert found == {EXACT: 1.0, PETRA: pytest.approx(4 / 3)}


def test_formula_of_memory_is_the_engines_accounting(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_cost, "DEVICES", (2,))
    request(tmp_path, "lm-memory")
    rows = [line.strip(" |").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 |")]
    assert [(row[1], row[2], row[3]) for row in rows[:2]] == [("PETRA", "1", "3"), ("PETRA", "2", "1")]
    assert len(rows) == 2 * len(language_cost.COMPARED)
    plan = language_cost.memory_plan(tiny("revgpt"), METHODS["petra"], 2)
    for j, counted in enumerate(formula(plan)):
        engine = predict_memory(plan, language_cost.adamw(), TensorSpec((CONTEXT,), torch.int64), process=j)
        assert counted == pytest.approx(engine.tensors, rel=0.25)


def test_formula_counts_graphs_inputs_or_nothing() -> None:
    inputs, stream = TensorSpec((1, CONTEXT), torch.int64), 4 * CONTEXT * WIDTH
    stages = [2, 2, 2]
    found = {
        keep: formula(make_plan(tiny("revgpt", 4), inputs, method=replace(METHODS["petra"], keep=keep), stages=stages))[1]
        for keep in (Keep.INPUT, Keep.NOTHING)
    }
    # Stage 2 has three microbatches in flight, and each of its two blocks stores both streams.
    assert found[Keep.INPUT] - found[Keep.NOTHING] == 3 * 2 * 2 * stream
    stashed = replace(METHODS["petra"], keep=Keep.GRAPH, weights=Weights.STASHED)
    graphs = formula(make_plan(tiny("revgpt", 4), inputs, method=stashed, stages=stages))[1]
    parameters = make_plan(tiny("revgpt", 4), inputs, stages=stages).stages[1].parameters
    temporary = found[Keep.NOTHING] - 16 * parameters - 4 * 2 * stream  # a graph, and the gradients of one of two blocks
    assert graphs - found[Keep.NOTHING] == 3 * 2 * (temporary - 4 * parameters // 2) - temporary


def test_speeds_over_free_links(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest stage computes all the time under PETRA, 4 units per microbatch; under 1F1B, 3 units and a bubble."""
    monkeypatch.setattr(language_cost, "LATENCY", 0.0)
    free = float("inf")
    made = make_plan(tiny("revgpt", 7), TensorSpec((1, CONTEXT), torch.int64), method="petra", stages=[3, 2, 2, 2])
    busiest = max(cost.forward + cost.backward for cost in stage_costs(made))
    assert CONTEXT / tokens_per_second(SCHEDULES["PETRA"], 4, free) == pytest.approx(busiest)
    plain = make_plan(tiny("gpt", 7), TensorSpec((1, CONTEXT), torch.int64), method="1f1b", k=256, stages=[3, 2, 2, 2])
    assert all(cost.backward == pytest.approx(2 * cost.forward) for cost in stage_costs(plain))
    assert all(cost.backward == pytest.approx(3 * cost.forward) for cost in stage_costs(made)[1:-1])
