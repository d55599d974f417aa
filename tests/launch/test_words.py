"""Words of the command line: texts as they were typed, paths, keys of Hydra, flags, sweeps; and what a mistake may mean."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch import compare, evaluate, plan, tokenize
from launch.bench import command as bench
from launch.config.compose import command_line_configs, compose_overrides
from launch.config.words import as_word, read_overrides
from launch.run.folder import as_data, read_config
from launch.runtime.rank import DUMPS, set_variables
from petra import PetraError
from petra.data import load_dataset
from petra.errors import ConfigError
from tests.support.commands import planned, refused


def read(*words: str) -> list[str | None] | str:
    """Return ``run_dir`` of each run on the command line, or the message of its error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["petra train", *words])
        try:
            return [config.run_dir for config in command_line_configs()]
        except ConfigError as error:
            return str(error)
        except SystemExit as ended:  # of Hydra's own parser
            return f"status {ended.code}"


def changed(folder: Path, *words: str) -> str:
    """Return ``data.root`` of a run's configuration with these words, as petra evaluate, resume and others read it."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(as_data(compose_overrides(["data=text", "model=gpt"]))))
    options = evaluate.run_parser("").parse_intermixed_args([str(folder), *words])
    return str(evaluate.run_config(options, options.words).data.options["root"])


@pytest.mark.parametrize("text", ["2026_11_22", "1e5", "1_0", "1.50", "true", "False", ".5", "007", "2026-11-22", "-1", "inf"])
def test_a_text_is_what_was_typed(text: str, tmp_path: Path) -> None:
    config = compose_overrides(["data=text", "model=gpt", f"run_dir={text}", f"data.root={text}", f"init_skip=[{text},a]"])
    assert (config.run_dir, config.data.options["root"], config.init_skip) == (text, text, [text, "a"])
    assert read(f"run_dir={text}") == [text]
    assert read("-m", f"run_dir={text},'{text}b'") == [text, f"{text}b"]
    assert changed(tmp_path, f"data.root={text}") == text


@pytest.mark.parametrize("text", ["a=b/lr=0.1", "it's", "{a}", "[a]", "[a", "a (1)", "ä ✓", "50%", "a:b", "#1", "a&b", 'say "x"'])
def test_a_path_may_have_any_letters(text: str, tmp_path: Path) -> None:
    assert read(f"run_dir={text}") == [text]
    assert changed(tmp_path, f"data.root={text}") == text


def test_quotes_and_null_keep_their_meaning(tmp_path: Path) -> None:
    assert read("run_dir='1_0'") == ["1_0"]
    assert read("run_dir=null") == [None]
    assert read("k=1_0", "run_dir=k${k}") == ["k10"]
    assert changed(tmp_path, "data.root='a=b'") == "a=b"


def test_a_number_in_a_file_is_no_text(tmp_path: Path) -> None:
    """YAML has made another number of it: 20261122."""
    content = OmegaConf.to_yaml(as_data(compose_overrides(["run_dir=x"]))).replace("run_dir: x", "run_dir: 2026_11_22")
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r'^run_dir: expected null or a text in quotes \("\.\.\."\), got 20261122$'):
        read_config(tmp_path / "config.yaml", OmegaConf.create(), trusted=False)


def test_a_number_for_a_text_of_a_function_of_ones_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from petra.models import revnet18\n\ndef network(classes: int, name: str):\n    return revnet18(classes)\n"
    (tmp_path / "named_network.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=r"^model\.name: expected a text; quote it twice .*, got 10$"):
        planned("model._target_=named_network.network", "model.name=1_0")
    planned("model._target_=named_network.network", "model.name='1_0'")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("quote", ["", "'"])
def test_the_home_folder_in_every_key(quote: str, home: str) -> None:
    path = f"{quote}~/x{quote}"
    with suppress(ConfigError):  # unquoted, Hydra's parser refuses it
        config = compose_overrides([*(f"{key}={path}" for key in ("run_dir", "init_from", "cluster.machines")), "model=revnet18"])
        assert {config.run_dir, config.init_from, config.cluster.machines} == {f"{home}/x"}
        config = compose_overrides(["model=huggingface", "data=text", f"model.path={path}", f"data.root={path}"])
        assert {config.model.options["path"], config.data.options["root"]} == {f"{home}/x"}
    assert read("run_dir=~/x") == [f"{home}/x"]


def test_the_home_folder_in_every_flag(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = evaluate.run_parser("").parse_args(["~/run", "--weights", "~/model.pt"])
    assert [str(options.run), str(options.weights)] == [f"{home}/run", f"{home}/model.pt"]
    assert f"{home}/run" in refused(compare.main, ["~/run"])
    assert f"{home}/m.yaml" in refused(plan.main, ["--machines", "~/m.yaml"])
    Path("text").write_text("some text")
    Path("out").write_text("a file")
    assert f"{home}/out" in refused(tokenize.main, ["~/text", "--vocabulary", "300", "--out", "~/out"])
    monkeypatch.setenv(DUMPS, "~/dumps/rank")
    set_variables()
    assert Path(home, "dumps").is_dir()


@pytest.mark.parametrize("call", [lambda path: read(f"run_dir={path}"), lambda path: load_dataset("imagenet", root=path)])
def test_a_home_that_is_unknown_is_one_line(call: Callable[[str], object]) -> None:
    try:
        told = call("~no_such_user/x")
    except PetraError as error:
        told = str(error)
    assert "expected a path without ~, since the home folder is unknown (./~ is a folder of this name)" in str(told)


@pytest.mark.parametrize("words", [("run_dir=",), ("run_dir=''",), ("data=text", "model=gpt", "data.root=")])
def test_an_empty_path_is_not_the_working_directory(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``run_dir=$FOLDER`` with a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    assert str(read(*words)).endswith(": expected a path, such as . for the working directory, got nothing")
    assert "expected a path" in refused(evaluate.main, ["", "--weights", ""])


HYDRA = (
    ("hydra.run.dir=out", "hydra.run.dir: expected run_dir=FOLDER, the folder of the run, got out"),
    ("hydra.sweep.dir=out", "hydra.sweep.dir: expected run_dir, such as 'run_dir=runs/k${k}' for the folders of a sweep over k"),
    ("hydra.sweep.subdir=x", "hydra.sweep.subdir: expected run_dir, such as"),
    ("hydra.job.chdir=true", "hydra.job.chdir: expected run_dir=FOLDER; petra stays in the working directory, got true"),
    ("hydra.output_subdir=hy", "hydra.output_subdir: expected run_dir=FOLDER"),
    ("hydra.job.env_set.OMP_NUM_THREADS=2", "hydra.job.env_set.OMP_NUM_THREADS: expected variables in the environment"),
    ("hydra/job_logging=default", "hydra/job_logging: expected no such key"),
    ("+hydra.callbacks.x._target_=mine.Log", "hydra.callbacks.x._target_: expected logger._target_=module.function"),
)


@pytest.mark.parametrize(("word", "message"), HYDRA, ids=lambda value: value[:20])
def test_keys_of_hydra_that_petra_does_not_have_are_refused(word: str, message: str) -> None:
    assert str(read("k=1", word)).startswith(message)
    with pytest.raises(ConfigError, match=r"^hydra[./]"):
        compose_overrides([word])


def test_a_file_can_not_set_them_either(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nhydra:\n  run:\n    dir: elsewhere\n")
    assert read("--config-dir", str(tmp_path), "experiment=mine") == (
        "hydra.run.dir: expected run_dir=FOLDER, the folder of the run, got elsewhere"
    )


@pytest.mark.parametrize("name", ["experiment/demo.yaml", "optim/adamw.yaml", "method/petra.yaml"])
def test_a_file_of_your_own_has_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("# @package _global_\nk: 2\n")
    expected = f"--config-dir: expected a file of another name than {name[:-5]}, which petra has, too, got {tmp_path / name}"
    assert read("--config-dir", str(tmp_path), "k=1") == expected
    (tmp_path / "experiment").mkdir(exist_ok=True)
    (tmp_path / name).rename(mine := tmp_path / "experiment" / "mine.yaml")
    mine.write_text("k: 2\n")
    assert "must begin with" in str(read(f"--config-dir={tmp_path}", "experiment=mine"))


def test_flags_of_hydra_without_a_meaning_are_refused() -> None:
    for flag in ("-cn", "--package", "--config-path"):
        assert str(read("k=1", flag, "x")).startswith(f"command line: no flag {flag}")


def test_keys_of_hydra_in_a_sweep() -> None:
    assert read("-m", "k=1,2", "run_dir=r${hydra:job.num}") == ["r0", "r1"]
    assert read("hydra.mode=MULTIRUN", "k=1,2", "run_dir='${hydra:job.name}_${k}'", "hydra.job.name=x") == ["x_1", "x_2"]


def test_runs_of_a_sweep_can_not_share_a_folder() -> None:
    expected = (
        "run_dir: expected another folder for each run of a sweep, such as 'run_dir=runs/k${k}' for the folders of a sweep over k"
    )
    assert read("-m", "k=1,2", "run_dir=x") == f"{expected}, got x"
    assert read("-m", "k=1,2", "run_dir=x${k}") == ["x1", "x2"]


MISTAKES = (
    ("--k=2", "command line: no flag --k; did you mean k=2?"),
    ("--dry-run", "command line: no flag --dry-run; did you mean dry_run=true?"),
    ("--batch-size=8", "command line: no flag --batch-size; did you mean data.batch_size=8?"),
    ("--nprocs 4", "command line: no flag --nprocs; did you mean --nproc?"),
    ("--something", "command line: no flag --something; keys are set by KEY=VALUE, and --help lists both"),
    ("--experimental-rerun x", "command line: no flag --experimental-rerun"),
    ("demo", "command line: expected experiment=demo, got demo"),
    ("revnet34", "command line: expected model=revnet34, got revnet34"),
    ("model=revnet19", "model: expected revnet18, another name (deeplabv3, gpt, gpt_4m, ...; --help lists all) or one of your own"),
)


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line_with_the_likely_meaning(words: str, message: str) -> None:
    assert str(read(*words.split())).startswith(message)


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (bench.main, [], "command line: expected gpu, got nothing"),
        (evaluate.main, ["run", "--data.root=x"], "command line: no flag --data.root; did you mean data.root=x?"),
        (evaluate.main, ["run", "--weigths", "x"], "command line: no flag --weigths; did you mean --weights?"),
        (plan.main, ["--k=2"], "command line: no flag --k; did you mean k=2?"),
    ],
)
def test_other_commands_name_the_likely_meaning(main: Callable[..., None], words: list[str], message: str) -> None:
    assert refused(main, words) == message


@pytest.mark.parametrize("value", [1.23456789e-3, 1e-5, 24.0, 3, None, True, [0, [True, None], 0.1 + 0.2], "input"])
def test_a_value_written_as_an_override_is_read_as_the_same_value(value: object) -> None:
    found = read_overrides([f"method.keep={as_word(value)}"]).method.keep
    assert (OmegaConf.to_container(found) if isinstance(value, list) else found) == value
