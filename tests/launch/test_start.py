"""Starts of a run: default folders, initial weights, petra resume, changed settings, and the weights that are read."""

import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from launch import evaluate, resume
from launch.compare import main as compare
from launch.config.compose import compose_overrides
from launch.run.records import default_folder
from launch.run.training import run
from launch.runtime.agent import StopRequest
from petra import PetraError
from petra.errors import Interrupted
from petra.training import load
from tests.support import commands
from tests.support.commands import ALONE, TINY, lines, refused

pytestmark = pytest.mark.usefixtures("shared_profiles")

SMALL = (*TINY, "data.size=16", "data.images=32", "model.width=0.25", "trainer.stages=2", "k=2", "trainer.export=pt")
AGAIN = ("run_dir=first", "resume=auto")


def train(*overrides: str) -> None:
    commands.train(*SMALL, *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of one epoch: four microbatches, two updates."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("run_dir=first")
    return folder / "first"


@pytest.fixture
def trained(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the finished run in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "first")
    return Path("first")


def test_a_resumed_run_removes_what_a_killed_one_left(trained: Path) -> None:
    (trained / "checkpoints" / "seen_by_all_0123.part").touch()
    train(*AGAIN)
    assert not [*trained.rglob("*.part")]


def test_a_link_to_a_disk_that_is_not_there_is_refused_before_training(trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    (trained / "checkpoints").symlink_to("nowhere")
    for name in ("summary.json", "model.pt"):
        (trained / name).unlink()
    with pytest.raises(PetraError, match=r"checkpoints/seen_by_all_.* cannot be written \(File exists\)"):
        train(*AGAIN)


def test_runs_that_start_in_the_same_second_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_overrides(SMALL)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(default_folder, [config] * 24))
    assert len({*folders}) == 24
    assert all(folder.parent == Path("runs") and folder.is_dir() for folder in folders)


REFUSED = [
    ("data.classes=7 init_from=first run_dir=new", r"model\.pt: block head does not fit"),
    ("init_from=first init_skip=[classifier] run_dir=new", r"init_skip: expected names of blocks \(stem, .*, head\), got cl"),
    ("optim.lr=0.5 schedule.gamma=0.3 resume_change=[optim.lr]", r"schedule\.gamma: expected 0\.1 as in"),
    ("optim=adamw resume_change=[optim,schedule]", r"optim\._target_: expected petra\.training\.optim\.sgd as in .*, got .*adamw"),
    ("data.batch_size=4 resume_change=[data]", r"04: expected data with 4 microbatches in an epoch, as in .*, got 8"),
    ("optim.weights=bf16 trainer.precision=bf16 resume_change=[optim,trainer]", r"^optim\.weights: expected float32 as in "),
    ("run_dir=new resume_change=[optm]", r"^resume_change: expected a list of keys and groups, got optm$"),
    ("k=4 resume_change=[k]", r"^k: expected 2 as in .*000000004, which the run resumes from \(init_from .*\), got 4"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_starts_that_are_refused(overrides: str, message: str, trained: Path) -> None:
    words = overrides.split()
    resumed = () if "init_from=first" in words else AGAIN
    with pytest.raises(PetraError, match=message):
        train(*resumed, "trainer.epochs=2", *words)


def test_a_run_resumes_with_the_initial_weights_with_which_it_started(trained: Path) -> None:
    """A restarted command names the same ones. Others would be recorded, but not loaded."""
    started = ("init_from=first", "init_skip=[head]", "run_dir=tuned", "resume=auto")
    train(*started)
    train(*started, f"init_from={trained.resolve()}")
    config = Path("tuned/config.yaml").read_text()
    for word, message in (
        (
            "init_from=first/model.pt",
            r"^init_from: expected .*first as in tuned/checkpoints/000000004, since the .* got first/model",
        ),
        ("init_skip=null", r"^init_skip: expected \['head'\] as in tuned/checkpoints/000000004, since .*, got null$"),
    ):
        with pytest.raises(PetraError, match=message):
            train(*started, word)
    with pytest.raises(PetraError, match=r"^init_from: expected null as in first/checkpoints/000000004, since .*, got tuned$"):
        train(*AGAIN, "init_from=tuned")
    assert Path("tuned/config.yaml").read_text() == config


@pytest.mark.parametrize(
    "overrides", ["k=5", "k=3 trainer.limit_batches=2", "k=9 trainer.epochs=2 trainer.stages=1", "dp=1 k=1000"]
)
def test_a_run_that_has_no_update_ends_before_training(overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has four microbatches. The last k that fits trains."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PetraError, match=r"^k: expected at most the \d microbatches of the run, which would have no update, got \d+$"
    ):
        train(*overrides.split(), "run_dir=none")
    assert not Path("none", "config.yaml").exists()


@pytest.mark.parametrize("overrides", ["outer.every=3", "outer.every=2 outer.overlap=1"])
def test_a_run_that_has_no_outer_step_ends_before_training(overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates. The network would be evaluated and exported as it was initialised."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PetraError, match=r"^outer\.every \+ outer\.overlap: expected at most 2, the updates of the run, .* got 3$"):
        train(*overrides.split(), "k=2", "run_dir=none")
    assert not Path("none", "config.yaml").exists()


def test_an_evaluation_needs_no_batch_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Single images, of which batch norm sees one value per channel: the numbers of larger batches."""
    monkeypatch.chdir(tmp_path)
    train("data.size=8", "run_dir=small")
    found = []
    for size in (1, 8):
        capsys.readouterr()
        evaluate.main(["small", f"data.batch_size={size}"])
        found.append(json.loads(capsys.readouterr().out))
    numbers = [{key: value for key, value in each.items() if isinstance(value, float)} for each in found]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert numbers[0]


def test_weights_of_a_network_with_another_head(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("data.classes=7", "optim.lr=0", f"init_from={trained}", "init_skip=[head]", "run_dir=tuned")
    told = f"initial weights of 9 of 10 blocks from {trained}/model.pt, after microbatch 4 (1 epochs done); random: head"
    assert told in capsys.readouterr().out
    before, after = load(trained / "model.pt"), load(Path("tuned/model.pt"))
    assert after["head.linear.weight"].shape[0] == 7
    weights = [key for key in before if key.endswith("weight") and not key.startswith("head.")]
    assert weights
    assert all(torch.equal(before[key], after[key]) for key in weights)


@pytest.mark.parametrize("content", [b"\0: [damaged", None])
def test_a_run_resumes_without_its_config_file(content: bytes | None, trained: Path) -> None:
    """The checkpoint has the configuration, so a damaged or missing config.yaml is replaced."""
    before = (trained / "config.yaml").read_text()
    (trained / "config.yaml").unlink()
    if content is not None:
        (trained / "config.yaml").write_bytes(content)
    train(*AGAIN, "trainer.epochs=2")
    assert (trained / "config.yaml").read_text() == before.replace("epochs: 1", "epochs: 2").replace("resume: null", "resume: auto")
    assert len(lines(trained / "metrics.jsonl")) == 2


@pytest.mark.parametrize(("left", "named"), [(("summary.json", "model.pt"), "summary.json, model.pt"), (("model.pt",), "model.pt")])
def test_a_run_with_results_does_not_start_again(left: tuple[str, ...], named: str, trained: Path) -> None:
    """Without a checkpoint, its records would be overwritten, and petra evaluate would take the old export."""
    shutil.rmtree(trained / "checkpoints")
    for name in {"summary.json", "model.pt"} - {*left}:
        (trained / name).unlink()
    before = {path: path.read_bytes() for path in trained.iterdir() if path.name != ".lock"}
    for words in ((), ("k=1",)):
        with pytest.raises(PetraError, match=rf"^run_dir: expected a folder without results, .* got first with {named} and no ch"):
            train(*AGAIN, *words)
    assert {path: path.read_bytes() for path in trained.iterdir() if path.name != ".lock"} == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a job that a cluster restarts: with the same configuration, but no other one."""
    shutil.rmtree(trained / "checkpoints")
    for name in ("summary.json", "model.pt", "report.html"):
        (trained / name).unlink()
    (trained / "changes.jsonl").write_text("{}\n")
    with pytest.raises(PetraError, match=r"^k: expected 2 as in first/config\.yaml, whose run starts again since .*, got 1$"):
        train(*AGAIN, "k=1")
    assert len(lines(trained / "metrics.jsonl")) == 1
    capsys.readouterr()
    train(*AGAIN, "trainer.epochs=2")
    assert "starting again, since the run has no checkpoint: 1 epochs are lost" in capsys.readouterr().out
    assert [row["epoch"] for row in lines(trained / "metrics.jsonl")] == [1, 2]
    assert not (trained / "changes.jsonl").exists()
    shutil.rmtree(trained / "checkpoints")
    for name in ("summary.json", "model.pt", "metrics.jsonl"):
        (trained / name).unlink()
    train(*AGAIN, "k=1")  # no epoch was done


def test_a_run_past_the_epochs_asked_for_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would export the weights of the middle of an epoch as those of the epochs asked for."""
    before = (trained / "model.pt").read_bytes()
    again = (*AGAIN, "checkpoint.every=2")
    with monkeypatch.context() as patch:
        patch.setattr("launch.run.training.StopRequest", StoppedAtOnce)
        with pytest.raises(Interrupted):
            train(*again, "trainer.epochs=2")
    message = (
        r"trainer\.epochs: expected an integer >= 2, because the run resumes from first/checkpoints/000000006, after microbatch 6 "
        r"with 4 microbatches in an epoch, got 1"
    )
    with pytest.raises(PetraError, match=message):
        train(*again, "trainer.epochs=1")
    assert (trained / "model.pt").read_bytes() == before
    assert "epochs: 2" in (trained / "config.yaml").read_text()
    train(*again, "trainer.epochs=2")
    train(*again, "trainer.epochs=2")  # nothing to train: a restarted command ends as before
    assert json.loads((trained / "summary.json").read_text())["epochs"] == 2


class StoppedAtOnce(StopRequest):
    """A request to stop that is there from the start, without signals."""

    def __call__(self) -> bool:
        return True

    def handle_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, float, str]:
    """Return the path of the weights that petra evaluate took for a run, their loss, and what it says about them."""
    capsys.readouterr()
    evaluate.main(["first", *words])
    out, err = capsys.readouterr()
    found = json.loads(out)
    return found["weights"], found["loss"], err


def last_loss() -> float:
    return float(lines(Path("first/metrics.jsonl"))[-1]["test_loss"])


def test_a_checkpoint_of_a_stopped_run_replaces_an_older_export(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.run.training.StopRequest", StoppedAtOnce)
    with pytest.raises(Interrupted):
        train(*AGAIN, "trainer.epochs=2", "checkpoint.every=2")
    path, loss, said = evaluated(capsys)
    assert path == "first/checkpoints/000000006"
    assert "weights of first/checkpoints/000000006, after microbatch 6 (1 epochs done)" in said
    assert "--weights first/checkpoints/000000004 takes the best checkpoint" in said
    assert loss != last_loss()


def test_moving_averages_are_taken_by_their_paths_only(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    average = (*AGAIN, "resume_change=[optim.average]")
    shutil.copytree("first/checkpoints/000000004", "best")
    train(*average, "trainer.epochs=2", "optim.average=0.9")
    path, loss, said = evaluated(capsys)
    assert path == "first/model.pt"
    assert "--weights first/ema.pt takes their moving average" in said
    monkeypatch.setattr("launch.run.weights.best_of", lambda _: Path("best"))
    assert "--weights best/average takes the best checkpoint" in evaluated(capsys)[2]
    assert loss != last_loss()  # the run evaluates its moving average
    assert evaluated(capsys, "--weights=first/ema.pt")[1] == last_loss()
    assert evaluated(capsys, "--weights=first/checkpoints/000000008")[1] == loss
    assert evaluated(capsys, "--weights=first/checkpoints/000000008/average")[1] == last_loss()
    train(*average, "trainer.epochs=3", "optim.average=null", "trainer.export=safetensors")
    path, loss, said = evaluated(capsys)
    assert (path, loss) == ("first/model.safetensors", last_loss()), "model.pt is older"
    assert "ema.pt" not in said
    error = refused(evaluate.main, ["first", "--weights=first/checkpoints/000000012/average"])
    assert "expected a checkpoint with a moving average (optim.average), got none" in error


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what is printed about a run in the folder ``a b`` that stops within its first epoch, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("launch.run.training.StopRequest", StoppedAtOnce)
        with pytest.raises(Interrupted) as interrupted:
            train("run_dir='a b'", "checkpoint.every=2")
    return f"{interrupted.value}; {interrupted.value.hint}"


def resumed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["petra resume", *words])
    (config,) = resume.read()
    run(config, ALONE)


def test_the_printed_command_continues_the_run(stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.fullmatch(r"stopped on request after microbatch 2, checkpoint written; to continue: (.*)", stopped)
    assert found is not None
    command = shlex.split(found[1])
    assert command == ["petra", "resume", "a b"]
    resumed(command[2:], monkeypatch)
    train("run_dir=whole", "checkpoint.every=2")
    one, other = load(Path("a b/model.pt")), load(Path("whole/model.pt"))
    assert all(one[key].equal(other[key]) for key in one)


def test_keys_on_the_command_line_change_the_run_from_here_on(
    stopped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed(["a b", "optim.lr=0.25", "trainer.epochs=2"], monkeypatch)
    assert "optim.lr is 0.25 from here on, was 0.1" in capsys.readouterr().out
    assert lines(Path("a b/changes.jsonl")) == [{"microbatch": 2, "key": "optim.lr", "before": 0.1, "now": 0.25}]
    resumed(["a b", "trainer.epochs=3"], monkeypatch)  # keeps the change
    compare(["a b"])
    assert "| a b* | " in capsys.readouterr().out
    rows, summary = lines(Path("a b/metrics.jsonl")), json.loads(Path("a b/summary.json").read_text())
    assert summary["wall_seconds"] == sum(row["seconds"] for row in rows), "that of all starts"
    assert "lr: 0.25" in Path("a b/config.yaml").read_text()
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a b", "optim.speed=1"], "optim.speed: no such key"),
        (["a b", "run_dir=other"], "run_dir: expected the folder of the run, a b, or nothing, got other"),
        (["a b", "init_from=a b"], "init_from: expected nothing, since the run resumes from its checkpoint .* got a b"),
        (["a b", "init_skip=[head]"], r"init_skip: expected nothing, since the run resumes from its checkpoint .* got \['head'\]"),
        (["a b", "resume=null"], "resume: expected auto or nothing, got None"),
        (["a b", "optim=adamw"], r"optim: expected single keys of the run's configuration \(optim.KEY=VALUE\), got adamw"),
        (["new"], "command line: expected the folder of a run with a checkpoint, got new without one"),
        ([], "command line: the following arguments are required: RUN"),
    ],
)
def test_invalid_command_lines_are_errors(words: list[str], message: str, stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("new").mkdir()
    Path("new/config.yaml").write_text(Path("a b/config.yaml").read_text())
    with pytest.raises(PetraError, match=f"^{message}"):
        resumed(words, monkeypatch)
