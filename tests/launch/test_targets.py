"""What ``_target_`` names: keys read from the source of petra without torch, and functions of a user's own (docs/own_model.md)."""

import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

import petra.inplace_abn  # noqa: F401
from launch.config.catalogue import all_keys, targets
from launch.config.compose import compose_overrides
from launch.config.keys import signature as parameters
from launch.config.schema import GIVEN, SECTIONS
from launch.evaluate import main as evaluate
from launch.run.build import set_up
from launch.run.folder import as_data, changes_results, read_config
from petra import ConfigError
from petra.data import DATASETS
from petra.errors import accepted, accepts
from petra.models import MODELS
from petra.training import FORMATS, OPTIMIZERS
from tests.structure import ROOT
from tests.support.commands import ALONE, refused
from tests.support.forked import Forked

KEYS_OF_4 = ("exact_streams", "message_format")
TARGETS = [target for group in SECTIONS for target in targets(group)]


@pytest.mark.parametrize("target", TARGETS)
def test_signatures_are_read_as_python_reads_them(target: str) -> None:
    found = get_object(target)
    inspected, read = inspect.signature(found).parameters, parameters(target)
    assert [*read] == [*inspected]
    for name, entry in inspected.items():
        default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
        default = str(default) if isinstance(default, str) else default  # not the member of an enumeration
        assert (read[name].default, type(read[name].default)) == (
            (..., type(...)) if default is entry.empty else (default, type(default))
        )
    made = (
        found.__init__
        if isinstance(found, type) and "__init__" in vars(found) and not hasattr(found, "__dataclass_fields__")
        else found
    )
    hints, texts = (
        get_type_hints(made, include_extras=True),
        {str | Path | None: str | None, Path: str},
    )  # a configured path is a text
    for name in (name for name in read if name not in GIVEN):
        assert {*accepted(read[name].hint)} == {*accepted(texts.get(hints[name], hints[name]))}, name


def test_shipped_targets_are_those_of_the_registries() -> None:
    for group, registry in (("model", MODELS), ("data", DATASETS), ("optim", OPTIMIZERS)):
        names = {name for name in targets(group) if not name.startswith("petra.huggingface")}  # of an extra
        assert {*map(get_object, names)} == {*registry.values()}  # type: ignore[attr-defined]
    assert {*accepted(all_keys()["trainer.export"].hint)} == {"none", *FORMATS}
    assert [key for key, entry in all_keys().items() if accepts(entry.hint, -1) or accepts(entry.hint, [-1])] == ["data.void"]
    assert not changes_results("data.split")  # a resumed run may evaluate another part of any data set
    assert changes_results("data.validation")


def test_a_key_of_an_experiment_that_another_model_lacks_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_overrides(["experiment=petra/quick", "model=revgpt"])
    assert "width" not in config.model.options
    assert capsys.readouterr().out.startswith(
        "model.width=0.25 of the experiment is left out, because it is for another model._target_"
    )
    assert compose_overrides(["experiment=petra/quick", "model._target_=mine.network", "model.depth=2"]).model.options == {
        "depth": 2
    }
    assert "width" in compose_overrides(["experiment=petra/quick", "model._target_=mine.network", "model.width=2"]).model.options
    with pytest.raises(ConfigError, match=r"model\.width: expected null for revgpt, which has the options dim, depth, "):
        compose_overrides(["model=revgpt", "model.width=0.5"])
    assert compose_overrides(["model=revgpt", "model.width=null"]).model.options["dim"] == 384
    assert compose_overrides(["model.width=null"]).model.options["width"] == 1  # null is the default of the signature
    assert compose_overrides(["schedule.milestones=null"]).schedule.options["milestones"] == []


@pytest.mark.parametrize(
    ("text", "trusted", "message"),
    [
        ("k: 1", True, "expected a run of format 4, got one of format 1; commit f6a0b0a2 is the last that reads it"),
        ("format: 5", True, "expected a run of format 4, got one of format 5"),
        ("format: 3\nmodel: {_target_: mine.net}", False, r"model\._target_: expected a function of petra, got mine\.net; --trust"),
        ("format: 3\nmodel: {norm: {_target_: os.system}}", False, r"model\.norm\._target_: expected a function of petra, got os"),
        ("format: 3\ndata: {_target_: petra.data.load.torch.load}", False, "expected a function or class of petra, got petra.data"),
    ],
)
def test_the_folder_of_a_run_is_data(text: str, trusted: bool, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "config.yaml", OmegaConf.create(), trusted=trusted)


@pytest.mark.parametrize(("streams", "exact", "form"), [("float32", False, None), ("exact", True, None), ("int8", False, "int8")])
def test_a_run_with_a_renamed_key_is_read(streams: str, exact: bool, form: str | None, tmp_path: Path) -> None:
    content = as_data(compose_overrides(["k=3"]))
    content["trainer"] = {**{key: value for key, value in content["trainer"].items() if key not in KEYS_OF_4}, "streams": streams}
    (tmp_path / "config.yaml").write_text(json.dumps({**content, "format": 3}))
    found = read_config(tmp_path / "config.yaml", OmegaConf.create(), trusted=False)
    assert (found.k, found.trainer.exact_streams, found.trainer.message_format) == (3, exact, form)
    with pytest.raises(ConfigError, match=r"^trainer.streams: no such key; use trainer.message_format=bf16 or int8"):
        compose_overrides([f"trainer.streams={streams}"])


OWN = ("model._target_=mine.network", "data._target_=mine.rows", "data.classes=3", "data.size=8")
SMALL = ("data.batch_size=8", "optim.lr=0.05", "trainer.device=cpu", "trainer.stages=2", "run_dir=run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with examples/own_functions.py as the module ``mine``. The test leaves no trace of the module."""
    shutil.copyfile(ROOT / "examples" / "own_functions.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.mark.processes
def test_an_own_model_and_data_set_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Forked(folder, [*OWN, *SMALL, "trainer.epochs=1"], 2) as run:
        run.finish()
    with Forked(folder, [*OWN, *SMALL, "trainer.epochs=2", "resume=auto"], 1) as run:
        printed, _ = run.finish()
    assert "resuming from run/checkpoints/" in printed
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["model"], summary["data"], summary["epochs"]) == ("mine", "mine.rows", 2)
    assert refused(evaluate, ["run"]) == "model._target_: expected a function of petra, got mine.network; --trust imports it"
    evaluate(["run", "--trust"])
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary["test_accuracy"])


def test_an_own_data_set_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import mine\ncalls = []\ndef rows(size):\n    calls.append(size)\n    return mine.rows(size)\n"
    (folder / "counted.py").write_text(source)
    setup = set_up(compose_overrides([*OWN, *SMALL, "data._target_=counted.rows"]), ALONE)
    setup.data()
    assert sys.modules.pop("counted").calls == [8]
    assert sys.path[-1] == str(folder), "a file of the user's must not replace an installed package"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model._target_=none_such.build"], r"model\._target_: none_such can't be imported \(ModuleNotFoundError: No module"),
        (["model._target_=mine.rows"], "model._target_: expected a function that returns a petra.model.Model, got mine.rows"),
        (["data._target_=broken_module.rows"], r"data\._target_: broken_module can't be imported \(ZeroDivisionError: division by"),
        (["data._target_=leaves.rows"], r"data\._target_: leaves can't be imported \(SystemExit: 0\)"),
        (["data.classes=4"], r"data\.classes: expected 3 for rows, got 4"),
        (["model.width=0.5"], r"model\.width: expected null for mine\.network, which has the options depth, got 0\.5"),
        (["model.depht=4"], r"model\.depht: no such key; did you mean model\.depth\?"),
        (["model._target_=mine:network"], "model._target_: expected .* or module.function of your own, got mine:network"),
    ],
)
def test_errors_of_own_functions_are_one_line(overrides: list[str], message: str, folder: Path) -> None:
    (folder / "broken_module.py").write_text("1 / 0")
    (folder / "leaves.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match=message):
        set_up(compose_overrides([*OWN, *SMALL, *overrides]), ALONE)
