"""Benchmarks: contestants compute the same, commands run with tiny sizes; grid, search and records of the staleness benchmark."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import expected, fine_tuning, pipelines, replicas, report, reversible_sequence, sft, stored_choices, vision
from benchmarks.records import RECORDS, merge, recorded
from benchmarks.records import main as merging
from benchmarks.reversible_peers import LIBRARIES, PEERS, gradients
from benchmarks.staleness import __main__ as command
from benchmarks.staleness import cells, costs, figures, law, pages, train
from benchmarks.staleness.cells import GRID, MOST_COMPARED, WINDOW, WINDOWS, Cell
from launch.run.folder import records_in
from petra import ConfigError, DataError, Recipe, TensorSpec, make_plan
from petra.data import load_dataset
from tests.data.test_tokens import write_llmc
from tests.structure import ROOT
from tests.support.commands import refused


@pytest.mark.parametrize("name", PEERS)
def test_reversible_peers_have_the_gradients_of_plain_autograd(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(name.lower())
    branches, x = reversible_sequence.build(4, channels=4, size=4, batch=2, dtype=torch.float64)
    found, expected = (gradients(n, branches, x) for n in (name, "plain autograd"))
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.processes
def test_pipelines_make_plain_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command, which itself compares each contestant's first update with plain autograd's. Other tests do it for petra."""
    only = ["PETRA, graphs kept, d = 1", pipelines.AUTO, "torch", "DeepSpeed"]
    sizes = ["--k=3", "--blocks=2", "--channels=4", "--size=4", "--batch=2", "--microbatches=1", "--threads=1"]
    monkeypatch.setattr(stored_choices, "LANGUAGE", {"classes": 5, "dim": 4, "heads": 2, "size": 3})
    out = ["--out", str(tmp_path / "figures.json"), "--rounds=2"]
    monkeypatch.setattr(sys, "argv", ["benchmark", "--works=revnet", *out, *sizes, "--only", *only])
    pipelines.main()
    found = json.loads((tmp_path / "figures.json").read_text())["revnet"]["k"]["3"]
    missing, live = found["not_installed"], found["live_bytes_and_resident_mib"]
    wanted = {name for name in (*pipelines.CONTESTANTS, pipelines.AUTO) if name.startswith(tuple(only))}
    assert set(found["periods"]) | set(missing) == wanted == set(live) | set(missing)
    assert min(seconds for times in found["periods"].values() for seconds in times) > 0
    printed = capsys.readouterr().out
    assert all(f"{name}: not installed" in printed for name in missing)
    assert "| 18 | 3 | " in printed


def test_the_grid_has_the_staleness_that_the_protocol_states() -> None:
    assert len({cell.name for cell in GRID}) == 50
    assert set(MOST_COMPARED) < set(GRID)
    found = Counter()
    for cell in GRID:
        inputs = TensorSpec((WINDOWS // cell.k, WINDOW), torch.int64)
        plan = make_plan(cell.make_model(), inputs, method=cell.make_method(), k=cell.k)
        found[cell.stages, cell.method, round(plan.stages[0].staleness, 1)] += 1
        Recipe(cell.make_optimizer(), extensions=cell.make_remedies()).check(plan)
    for control in ("dsp", "delayed"):
        assert {s for j, method, s in found if (j, method) == (16, control)} == {0.9, 1.9, 3.8, 7.5}
    assert {s for j, method, s in found if method in ("pipedream_2bw", "paci")} <= {0.9, 1.0}
    assert {(8, "petra", 3.5), (8, "dsp", 3.5), (32, "petra", 3.9), (32, "dsp", 3.9)} <= set(found)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part, count in (("train", 600), ("val", 60), ("test", 60)):
        write_llmc(tmp_path / f"{part}_000000.bin", generator.integers(0, 8, count).astype("<u2"))
    facts = {part: {"documents": 1, "tokens": n, "bytes": 2 * n} for part, n in (("train", 600), ("val", 60), ("test", 60))}
    (tmp_path / "corpus.json").write_text(json.dumps({"classes": 8, "delimiter": 0, **facts}))
    return tmp_path


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"VOCABULARY": 8, "WINDOW": 4, "SHAPES": {16: (2, 8, 2, 8)}, "VALIDATION_WINDOWS": 4, "TEST_WINDOWS": 4, "UPDATES": 4}
    for module, (name, value) in product((cells, train, command), sizes.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("_small")
def test_records_of_a_cell(tokens: Path, tmp_path: Path) -> None:
    """Twice the same records, and losses equal to those of a loop over the validation part with the trained weights."""
    cell, out = Cell("petra", 16), tmp_path / "runs"
    out.mkdir()
    records = list(command.trials(cell, tokens, out))
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(written) == len(records)
    assert list(command.trials(cell, tokens, out)) == records
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written, "finished runs are not repeated"
    final = [record for record in records if record["seed"] != command.SEARCH_SEED]
    assert [record["seed"] for record in final] == [0, 1, 2]
    assert [record for record in records if "test" in record["loss"]] == final
    assert len(final[0]["curve"]) == 4
    assert final[0]["bits_per_byte"]["val"] == pytest.approx(final[0]["loss"]["val"] / np.log(2) / 2)


def test_the_search_chooses_by_the_validation_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best rate is beyond the last one of the first round, and the longer warm-up is better."""

    def pretend(trial: train.Trial, data: Path, out: Path) -> dict[str, object]:
        loss = abs(np.log2(trial.rate / 1.6e-2)) + (0 if trial.warmup > 0.2 else 0.1)
        return {"rate": trial.rate, "warmup": trial.warmup, "updates": trial.updates, "seed": trial.seed, "loss": {"val": loss}}

    monkeypatch.setattr(train, "run", pretend)
    records = list(command.trials(Cell("backprop"), tmp_path, tmp_path))
    searched = [record["rate"] for record in records if record["seed"] == command.SEARCH_SEED and record["warmup"] == command.SHORT]
    assert searched == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], "one rate beyond the best"
    assert {record["updates"] for record in records} == {train.UPDATES}, "the search's runs are as long as the final ones"
    final = [record for record in records if record["seed"] != command.SEARCH_SEED]
    assert [(record["rate"], record["warmup"]) for record in final] == [(1.6e-2, 0.3)] * 5


def test_every_k_reads_the_same_tokens(tokens: Path) -> None:
    data = load_dataset("tokens", root=tokens, size=4, classes=8)

    def windows(k: int) -> torch.Tensor:
        source = train.TrainSource(data, WINDOWS // k, seed=1)
        return torch.cat([source.inputs(m) for m in range(2 * k)])

    assert all(torch.equal(windows(4), windows(k)) for k in (8, 16, 32))


def test_records_of_many_files_are_those_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and values stay as they are, two processes' folders make one file, a program reads either, and nothing is replaced."""
    first, second, file = tmp_path / "a", tmp_path / "b", tmp_path / "records" / "all.jsonl"
    values = {
        "b_lr1e-05_s1": {"rate": 1e-05, "curve": [0.1, 1 / 3, np.inf], "setting": {"k": 4, "keep": None}},
        "a.5": {"text": "x̃"},
    }
    for folder, name in zip((first, second), values, strict=True):
        assert recorded(folder, name, lambda name=name: values[name]) == values[name]
    merging([str(first), str(file)])
    merging([str(second), str(first), str(file)])
    assert capsys.readouterr().out == f"{file}: 1 records\n{file}: 2 records\n"
    assert [*records_in(file).items()] == sorted(values.items())
    assert [line[:12] for line in file.read_text().splitlines()] == ['{"name":"a.5', '{"name":"b_l']
    assert recorded(file, "a.5", lambda: {}) == values["a.5"]
    with pytest.raises(ConfigError, match="--out: expected a folder, to train c"):
        recorded(file, "c", lambda: {})
    merging([str(file), str(tmp_path / "c")])
    assert [*records_in(tmp_path / "c").items()] == sorted(values.items())
    capsys.readouterr()
    before = file.read_text()
    (second / "a.5.json").write_text('{"text": "y"}')
    assert refused(merging, [str(second), str(file)]) == f"{second}: expected equal records of equal names, got a.5"
    assert file.read_text() == before
    file.write_text(before + before)
    with pytest.raises(DataError, match=r"one record of each name, got two of a\.5"):
        merge([], file)
    file.write_text("[1]\n")
    with pytest.raises(DataError, match="expected the record of a run, got another file"):
        records_in(file)


def test_records_are_few_files_in_one_folder() -> None:
    listed = subprocess.run(["git", "ls-files", "*.json", "*.jsonl"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    found = [path for path in listed if not path.startswith(("tests/", "docker/", "launch/", "petra/", "conf/"))]
    assert {str(Path(path).parent) for path in found} <= {str(RECORDS.relative_to(ROOT))}
    assert len(found) <= 15


def test_modules_with_a_command_run_it() -> None:
    """A module without the call does nothing, and says nothing."""
    texts = {path: path.read_text(encoding="utf-8") for path in Path(report.__file__).parent.rglob("*.py")}
    commands = {path: text for path, text in texts.items() if "\ndef main(" in text}
    assert len(commands) > 20
    assert [path for path, text in commands.items() if 'if __name__ == "__main__":' not in text] == []


def evidence(page: str) -> str:
    """Return the text of a page of measurements."""
    return (RECORDS.parent / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("benchmark", "page"), [(fine_tuning, "fine_tuning"), (sft, "fine_tuning"), (vision, "images")])
def test_tables_are_those_of_the_records(benchmark: Any, page: str) -> None:
    records = [*records_in(RECORDS / f"{Path(benchmark.__file__).stem}.jsonl").values()]
    text = evidence(page)
    assert all(row in text for row in benchmark.table(records).split("\n\n")[0].splitlines())


def test_cosines_of_images_are_those_of_the_record() -> None:
    found = json.loads((RECORDS / "image_cosines.json").read_text())["means by epoch, of stages 1 to 10"]
    training, delayed = found["cosine_end_to_end"], found["cosine_delayed_end_to_end"]
    for second in (training[1], delayed[1]):
        assert f"{min(second):.2f} to {max(second):.2f} in the" in evidence("images")
    assert sorted(range(10), key=training[1].__getitem__)[:3] == [1, 0, 2], "the first three stages"
    assert min(map(min, training[2:])) >= 0.99


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    """The page has the table that the records give. Interval of the differences 1, 2 and 3: 2 ± 4.303 · 1 / √3 (Student's t)."""
    records = figures.read_all(RECORDS / "staleness.jsonl")
    assert pages.cells_page(records) == evidence("staleness_cells"), "python -m benchmarks.staleness.pages has news"
    page = evidence("prediction") + evidence("late_gradients") + evidence("claims")
    assert figures.best(records) in page
    assert expected.markdown([*expected.text_rows()]) in page
    compared = [each["cosine"] for each in json.loads((RECORDS / "staleness_cosines.json").read_text())["cells"].values()]
    assert all(f"| {' | '.join(f'{value:.3f}' for value in row)} |" in page for row in zip(*compared, strict=True))
    for staleness, k in (("0.94", 32), ("1.88", 16), ("3.75", 8), ("7.50", 4)):
        petra, dsp, late = (figures.final(records[f"j16_{method}_k{k}_adamw"]) for method in ("petra", "dsp", "delayed"))
        pairs = ((late, figures.final(records["j16_backprop_k8_adamw"])), (dsp, late), (petra, dsp))
        parts = [figures.difference(*pair) or (0, 0) for pair in pairs]
        assert f"| {staleness} | {' | '.join(f'{mean:.2f} ± {half:.2f}' for mean, half in parts)} |" in page
    gaps = {cell: figures.difference(figures.final(records[cell]), figures.base(cell, records)) for cell in records}
    order = sorted((gaps[cell.name] or (0, 0), cell.name) for cell in cells.GRID if cell.method != "backprop")
    assert {cell for _, cell in order[:2] + order[-3:]} == {f"j16_{cell}" for cell in cells.AGAIN}
    for optimizer in ("adamw", "muon"):  # the same updates at almost the same rates, as costs.ways assumes
        one, two = (figures.final(records[f"j16_petra_{name}_{optimizer}"]) for name in ("d1_k8", "k16"))
        assert all(one[seed] == pytest.approx(two[seed], abs=0.01) for seed in (0, 1, 2))
    claims = re.findall(r"`(j\d+_\w+)` − `(j\d+_\w+)` \| (\S+ ± \S+) \|([^|]*)", page)
    for cell, other, stated, verdict in claims:
        one, two = (figures.final(records[name]) for name in (cell, other))
        mean, half = figures.difference(one, two) or (0, 0)
        assert f"{mean:.3f} ± {half:.3f}" == stated
        if (share := re.search(r"(\S+ ± \S+) %", verdict)) is not None:  # of the gap of ``other``
            reference = figures.base(other, records)
            shares = {seed: 100 * (two[seed] - one[seed]) / (two[seed] - reference[seed]) for seed in one.keys() & two.keys()}
            mean, half = figures.difference(shares, dict.fromkeys(shares, 0.0)) or (0, 0)
            assert f"{mean:.0f} ± {half:.0f}" == share[1]
    assert len(claims) >= 10
    for cell, other, stated in (
        ("pipedream_2bw_nothing_k16_muon_feedback", "backprop_k8_muon", "0.066 ± 0.020"),
        ("pipedream_2bw_nothing_k16_muon_feedback", "pipedream_2bw_k16_muon", "-0.021 ± 0.014"),
        ("pipedream_2bw_nothing_k16_muon_feedback", "petra_k32_muon", "0.041 ± 0.006"),
        ("petra_k16_adamw_b1=0.95", "petra_k16_adamw", "0.103 ± 0.054"),
    ):
        mean, half = figures.difference(*(figures.final(records[f"j16_{name}"]) for name in (cell, other))) or (0, 0)
        assert f"{mean:.3f} ± {half:.3f}" == stated
    assert figures.difference({0: 2.0, 1: 4.0, 2: 6.0, 5: 0.0}, {0: 1.0, 1: 2.0, 2: 3.0}) == pytest.approx((2, 4.303 / 3**0.5))
    figures.draw(records, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_replicas_are_compared_with_sums_at_every_update_seed_by_seed() -> None:
    def record(dp: int, seed: int, bits: float, error: float) -> dict[str, Any]:
        errors = {"1": 0.0, "2": error, "2 across a step": 2 * error}
        return {"every": 16, "dp": dp, "seed": seed, "bits_per_byte": {"test": bits}, "reconstruction_error": errors}

    found = {"h16_dp4_s0": record(4, 0, 2.5, 0.3), "h16_dp2_s0": record(2, 0, 2.4, 0.1), "h16_dp2_s1": record(2, 1, 2.42, 0.3)}
    assert replicas.table(found, {0: 2.38, 1: 2.40, 2: 2.41}).splitlines()[2:] == [
        "| `h16_dp2` | 2 | 2.410 | 0.02 ± 0.00 | 0.20 | 0.40 |",
        "| `h16_dp4` | 1 | 2.500 | 0.12 | 0.30 | 0.60 |",
    ]
    runs = [run for run in records_in(RECORDS / "staleness.jsonl").values() if run["cell"] == replicas.CELL.name]
    assert replicas.table(records_in(RECORDS / "replicas.jsonl"), figures.final(runs)) in evidence("links")


def test_programs_quote_the_expected_losses_of_the_records() -> None:
    assert expected.table() == (ROOT / "launch/run/expected.csv").read_text(encoding="utf-8"), (
        "python -m benchmarks.expected has news"
    )


def test_the_law_finds_the_constants_of_data_that_obey_it_and_the_page_has_its_table() -> None:
    found = law.penalties(figures.read_all(RECORDS / "staleness.jsonl"))
    assert law.table(found) in evidence("law")
    true = {"power": 0.7, "adamw": 12.0, "muon": 3.0, "nadam": 9.0, "basis_rotation": 4.0}
    true |= {"stashed": 0.8, "reconstruction": 1.2, "feedback": 0.6, "prediction": 0.9}
    obeying = [replace(cell, percent=law.predicted(true, cell)) for cell in found]
    fitted = [cell for cell in obeying if not law.held_out(cell.cell, cell.setting)]
    assert law.fit(fitted) == pytest.approx(true)
    assert len(law.fit(fitted)) <= len(fitted) / 4
    assert all(by_law == pytest.approx(cell.percent) for cell, _, by_law, _ in law.trials(obeying))
    two = {cell.cell: cell.staleness for cell in found}
    assert (two["j16_pipedream_2bw_k16_muon"], two["j16_petra_k16_muon"]) == (1.0, pytest.approx(15 / 16))
    ends = [replace(found[0], staleness=s, percent=p) for s, p in ((1.0, 10.0), (4.0, 30.0))]
    assert law.interpolated(replace(found[0], staleness=2.0), ends) == pytest.approx(20)
    assert law.interpolated(replace(found[0], staleness=5.0), ends) is None


def test_times_to_a_loss_are_those_of_the_records(tmp_path: Path) -> None:
    """The page has the tables that the records give. On links without limit, PETRA takes k times the longest stage."""
    records = figures.read_all(RECORDS / "staleness.jsonl")
    page = evidence("time_to_a_loss_tables")
    hours = re.findall(r"^\|[^|]*\| \d+ \|.*\d\.\d{3}.*\|$", evidence("time_to_a_loss"), re.MULTILINE)
    assert len(hours) == 9
    assert all(row in page for row in hours)
    for j, optimizer in ((8, "adamw"), (16, "adamw"), (16, "muon"), (32, "adamw")):
        assert all(costs.times(costs.ways(records, j, optimizer, remedies), j) in page for remedies in (True, False))
    found = costs.ways(records, 16, "muon")
    petra, zb_h1 = (next(way for way in found if way.schedule == name) for name in ("petra", "zb_h1"))
    loss = costs.common_loss(found)
    for link, first in zip(costs.BANDWIDTHS[12:14], (petra, zb_h1), strict=True):
        assert min((petra, zb_h1), key=lambda w: costs.updates_until(w.curve, loss) * costs.update_seconds(w, 16, link)) is first
    assert costs.faster(found, 16) in page
    way = next(way for way in costs.ways(records, 16, "adamw") if way.schedule == "petra")
    size = WINDOWS // way.ks[0]
    profiles = costs.decoder("revgpt", 16).profile(TensorSpec((size, costs.TOKENS), torch.int64))
    layer, head = 4 * profiles[1].flops, 3 * profiles[-1].flops  # F, F again except in the last stage, and twice F in B
    seconds = max(layer, head) / costs.FLOPS / costs.speed(size)
    assert costs.update_seconds(way, 16, float("inf")) == pytest.approx(way.ks[0] * seconds, rel=1e-3)
    assert costs.updates_until([5.0] * costs.SMOOTH + [4.0, 3.0], 4.0) == costs.SMOOTH + 1


def test_vision_chooses_on_images_that_are_not_trained_on_and_continues_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_dataset("synthetic", images=80, size=16, classes=3)
    parts: Any = (vision.part_of(data.train, 64, 16, augment=False), data.train)
    assert torch.equal(parts[0].inputs(torch.arange(16), 5), parts[1].inputs(torch.arange(64, 80), None))
    sizes = {"WIDTH": 0.0625, "BATCH": 8, "TRAINING": 64, "VALIDATION": 16, "SHORT": 4, "EPOCHS": 4, "SEEDS": (0, 1)}
    rates = {"sgd": (vision.sgd, (0.02, 0.1, 0.5))}
    for name, value in {**sizes, "OPTIMIZER": rates, "load_dataset": lambda name, root: data}.items():
        monkeypatch.setattr(vision, name, value)
    alone = vision.run(vision.Setting("petra"), 0.1, 4, 0, data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        evaluate = vision.Trainer._evaluate
        patch.setattr(vision.Trainer, "_evaluate", lambda trainer, epoch: interrupted(evaluate(trainer, epoch)))
        with pytest.raises(KeyboardInterrupt):
            vision.run(vision.Setting("petra"), 0.1, 4, 0, data, tmp_path / "parts")
    assert vision.run(vision.Setting("petra"), 0.1, 4, 0, data, tmp_path / "parts")["validation"] == alone["validation"]
    other = vision.run(vision.Setting("petra", remedy="feedback"), 0.1, 4, 0, data, tmp_path / "whole")
    assert other["remedy"] == "feedback"
    assert other["train_loss"] != alone["train_loss"]
    monkeypatch.setattr(sys, "argv", ["benchmark", str(tmp_path), "--out", str(tmp_path), "--remedy", "feedback"])
    with pytest.raises(SystemExit):
        vision.main()
    assert "--methods: expected methods with late gradients for --remedy, got backprop, reversible" in capsys.readouterr().err
    arguments = ["benchmark", str(tmp_path), "--out", str(tmp_path), "--methods", "petra"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--picture", str(tmp_path / "curves.png")])
    vision.main()
    names = {path.name for path in tmp_path.glob("*.json")}
    assert {"petra__lr0.02_e4_s100.json", "petra__lr0.5_e4_s100.json"} < names
    assert "| revnet18 | petra | sgd | 4.5 | " in capsys.readouterr().out
    vision.main()
    assert {path.name for path in tmp_path.glob("*.json")} == names


def test_normalized_muon_scales_weights_and_makes_steps_of_the_rate() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))
    optimizer = vision.NormalizedMuon(module)
    before, rest = {p: p.detach().clone() for p in (module[0].weight, module[3].weight)}, module[1].weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p, old in before.items():
        change = (p - old * (len(p) ** 0.5 / old.norm())).flatten(1) / 0.1
        values = torch.linalg.svdvals(change.detach())
        assert (values > 0.3).all()
        assert (values < 1.6).all()
    assert module[1].weight.grad is not None
    torch.testing.assert_close(module[1].weight, rest - 0.1 * 1.85 * module[1].weight.grad)  # Nesterov momentum 0.85


def interrupted(row: dict[str, float]) -> dict[str, float]:
    """Return the numbers of an epoch, or interrupt the run in the third."""
    if row["epoch"] == 3:
        raise KeyboardInterrupt
    return row


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = report.cells_parser("", ["a", "b"])
    assert parser.parse_args(["tokens", "--out", "runs"]).cells == ["a", "b"]
    assert parser.parse_args(["tokens", "--out", "runs", "--cells", "b"]).cells == ["b"]
    with pytest.raises(SystemExit):
        parser.parse_args(["tokens", "--out", "runs", "--cells", "b", "c"])
    assert "argument --cells: invalid choice: 'c'" in capsys.readouterr().err
