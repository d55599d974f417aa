"""Compare data, tokenizers, images, evaluation, reports and plans with values from elsewhere: ``python -m stress.silent_data``.

Each try has an expectation that does not come from petra: plain Python, numpy, Pillow, tokenizers, torch or arithmetic. Prints a
line for each with its area, and exits with status 1 if one is wrong. ``--only TEXT`` runs those with a text in their names.
"""

import io
import json
import math
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from launch import compare, evaluate, plan, predict, report, tokenize
from petra import BlockSpec, Model, Pipeline, Recipe, TensorSpec
from petra.data import EvalSource, Preparation, TrainSource, from_dataset, load_dataset
from petra.data.arrays import augment
from petra.data.imagenet import MOMENTS
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.label_maps import LabelValues
from petra.models import revnet18
from petra.training import load, sgd
from stress.frame import run_tries
from tests.support.commands import TINY, lines, train
from tests.support.fakes import smooth_image, write_image_folders

Try = Callable[[Path], tuple[object, object]]
TRIES: dict[str, tuple[str, Try]] = {}
"""Area and function of each try by name. The function gets an empty folder, and returns what is expected and what was found."""
IMAGES = ("data=imagenet", "data.size=16", "data.classes=3", "model=resnet18", "model.width=0.0625", "model.stem=cifar", "k=1")
SHORT = ("trainer.epochs=1", "trainer.device=cpu", "schedule.warmup_epochs=0", "data.workers=0", "data.batch_size=2")
REFUSED = "refused"


def attempt(area: str) -> Callable[[Try], Try]:
    """Register a function as a try. Its name is that of the try."""

    def add(function: Try) -> Try:
        TRIES[function.__name__] = area, function
        return function

    return add


def called(main: Callable[[list[str]], None], *words: object) -> str:
    """Return what a command prints, or :data:`REFUSED` if it ends with an error of one line."""
    output, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            main([str(word) for word in words])
    except SystemExit:
        return REFUSED if errors.getvalue().splitlines()[-1].startswith("error: ") else errors.getvalue()
    return output.getvalue()


def close(a: Any, b: Any, tolerance: float = 1e-5) -> tuple[object, object]:
    """Return two numbers or arrays, equal if they differ by less than the tolerance relative to the first."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    equal = a.shape == b.shape and bool(np.allclose(a, b, rtol=tolerance, atol=tolerance))
    return ("close", "close") if equal else (a.tolist(), b.tolist())


@attempt("images")
def modes_of_png_and_jpeg_are_pillows_rgb(folder: Path) -> tuple[object, object]:
    """Greyscale, bits, palettes, transparency, CMYK: what ``convert("RGB")`` gives, without resizing."""
    rng, wrong = np.random.default_rng(0), []
    pixels = Image.fromarray(rng.integers(0, 256, (16, 16, 4), dtype=np.uint8), "RGBA")
    for mode, form in (("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG")):
        options = {"transparency": 3} if mode == "P" else {}
        pixels.convert("RGB").convert(mode).save(folder / "a", form, **options)
        with Image.open(folder / "a") as image:
            expected = np.asarray(image.convert("RGB"), float) / 255
        found = Preparation(16, ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))(folder / "a")[0].permute(1, 2, 0).numpy()
        wrong += [] if np.allclose(found, expected, atol=1e-6) else [(mode, form)]
    return [], wrong


@attempt("images")
def random_crops_are_windows_of_the_padded_image(folder: Path) -> tuple[object, object]:
    """Each of 2000 crops is one of 81 windows or its mirror image, by numpy, and all 162 occur about equally often."""
    image = np.random.default_rng(1).integers(1, 256, (3, 8, 8), dtype=np.uint8)
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[:, top : top + 8, left : left + 8]
            windows[window.tobytes()], windows[window[:, :, ::-1].tobytes()] = (top, left, 0), (top, left, 1)
    batch = torch.from_numpy(image)[None].expand(2000, -1, -1, -1)
    found = Counter(windows.get(crop.numpy().tobytes()) for crop in augment(batch, True, 5, torch.arange(2000)))
    chi = sum((found[place] - 2000 / 162) ** 2 / (2000 / 162) for place in windows.values())
    return (True, True), (None not in found, 161 - 4 * math.sqrt(322) < chi < 161 + 4 * math.sqrt(322))


@attempt("images")
def labels_of_an_interlaced_palette_png_are_its_indices(folder: Path) -> tuple[object, object]:
    """Not the colours, and not the brightness of the colours."""
    indices = np.random.default_rng(2).integers(0, 5, (9, 7), dtype=np.uint8)
    image = Image.fromarray(indices, "P")
    image.putpalette([value for i in range(256) for value in (255 - i, 7 * i % 256, 0)])
    image.save(folder / "a.png", interlace=1, transparency=2)
    values = LabelValues({0: 0, 1: 1, 2: 2, 3: 3}, [4], "from 0 to 3, or 4")
    return np.where(indices == 4, -100, indices.astype(int)).tolist(), values.read(folder / "a.png").tolist()


@attempt("images")
def predictions_are_those_of_plain_torch(folder: Path) -> tuple[object, object]:
    """``petra predict`` against Pillow and a loop over the exported weights: resized, cropped, normalised by hand."""
    write_image_folders(folder / "d")
    os.chdir(folder)
    with redirect_stdout(io.StringIO()):
        train(*IMAGES, *SHORT, "data.root=d", "run_dir=r", "trainer.export=pt", "optim.lr=0.2")
    paths = sorted((folder / "d/val").glob("*/*"))
    from omegaconf import OmegaConf

    from launch.run.build import model_of
    from launch.run.folder import read_config

    network = model_of(read_config(folder / "r/config.yaml", OmegaConf.create(), trusted=False)).build(0)
    network.load_state_dict(load(folder / "r/model.pt"))
    expected = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        scale = round(16 * 256 / 224) / min(image.size)
        image = image.resize([max(round(16 * 256 / 224), int(scale * side)) for side in image.size], Image.Resampling.BILINEAR)
        left, top = round((image.width - 16) / 2), round((image.height - 16) / 2)
        pixels = np.asarray(image.crop((left, top, left + 16, top + 16)), np.float32) / 255
        x = torch.from_numpy((pixels - MOMENTS[0]) / MOMENTS[1]).float().permute(2, 0, 1)[None]
        share, label = network.eval()(x).softmax(1)[0].detach().max(0)
        expected.append(f"class {int(label)} (n{int(label):02}), {float(share):.1%}")
    return expected, [line.split(": ", 1)[1] for line in called(predict.main, "r", *paths).splitlines()]


@attempt("data sets")
def every_epoch_shows_each_sample_once(folder: Path) -> tuple[object, object]:
    """Counted over four epochs whose batches divide the samples, in four different orders."""
    numbers = [(torch.tensor([float(i)]), i) for i in range(60)]
    source = TrainSource(from_dataset(numbers), 12, seed=3)
    epochs = [[int(i) for m in range(5 * e, 5 * e + 5) for i in source.inputs(m)[:, 0]] for e in range(4)]
    return (4, [*range(60)] * 4), (len({tuple(epoch) for epoch in epochs}), [i for epoch in epochs for i in sorted(epoch)])


@attempt("data sets")
def classes_are_in_the_order_of_python(folder: Path) -> tuple[object, object]:
    """Upper case before lower case, and 10 before 9, as in torchvision's ImageFolder."""
    names = ["b", "A", "a", "10", "9", "é", "Z_1"]
    for part in ("train", "val"):
        for i, name in enumerate(names):
            (folder / part / name).mkdir(parents=True)
            smooth_image(20, 20 + (part == "val"), seed=i).save(folder / part / name / "0.png")
    data = load_dataset("imagenet", root=folder, size=16)
    labels = data.train.targets(torch.arange(len(names)), None).tolist()
    return (tuple(sorted(names)), [*range(len(names))]), (data.preparation.classes, labels)


@attempt("data sets")
def the_two_parts_of_a_text_are_its_bytes(folder: Path) -> tuple[object, object]:
    """Nothing is in both, and test windows predict each byte of the last tenth but the first, once, with no other one."""
    content = "".join(f"{i}: naïve\r\n" for i in range(700)).encode()
    (folder / "a.txt").write_bytes(content)
    data, cut = load_dataset("text", root=folder / "a.txt", size=50), round(len(content) * 0.9)
    shown = data.train.inputs(torch.arange(data.train.count), None).flatten().tolist()
    targets = [t for t in data.test.targets(torch.arange(data.test.count), None).tolist() if t != -100]
    return ([*content[: len(shown)]], [*content[cut + 1 :]], True), (shown, targets, len(shown) <= cut)


@attempt("data sets")
def windows_do_not_cross_files(folder: Path) -> tuple[object, object]:
    """Over three files of any lengths, each token but the first of a file is predicted once, from the one before."""
    rng, expected = np.random.default_rng(4), Counter[tuple[int, int]]()
    for name, length in (("train_0", 90), ("val_0", 23), ("val_1", 64), ("val_2", 5)):
        words = rng.integers(0, 300, length).astype("<u2")
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, length
        (folder / f"{name}.bin").write_bytes(header.tobytes() + words.tobytes())
        if name.startswith("val"):
            expected.update(zip(words[:-1].tolist(), words[1:].tolist(), strict=True))
    test = load_dataset("tokens", root=folder, size=8, classes=300).test
    every = torch.arange(test.count)
    pairs = zip(test.inputs(every, None).flatten().tolist(), test.targets(every, None).tolist(), strict=True)
    return expected, Counter(pair for pair in pairs if pair[1] != -100)


class Noisy:
    """Samples that draw from the generators of Python, numpy and torch."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index + random.random(), np.random.rand(), float(torch.rand(1))]), index


@attempt("data sets")
def augmentation_differs_by_sample_and_epoch_only(folder: Path) -> tuple[object, object]:
    """Another batch size reads the same noise for the same sample. Two epochs and two samples have different noise."""
    few, many = (TrainSource(from_dataset(Noisy()), size, seed=1) for size in (4, 12))
    rows = [{int(r[0]): r for m in range(24 // size * 2) for r in source.inputs(m)} for size, source in ((4, few), (12, many))]
    first = {int(row[0]): row for m in range(6) for row in few.inputs(m)}
    same = all(torch.equal(rows[0][i], rows[1][i]) for i in range(24))
    noise = {tuple(float(v) for v in row[1:]) for found in (rows[0], first) for row in found.values()}
    return (True, 48), (same, len(noise))


@attempt("tokenizers")
def a_normaliser_that_changes_a_late_document(folder: Path) -> tuple[object, object]:
    """A vocabulary with NFC, as many have, does not give a decomposed letter back. It is in document 500 of 1000."""
    from tokenizers import Tokenizer, normalizers

    texts = [f"document {i} of many" for i in range(1000)]
    texts[500] += " cafe\u0301"
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    called(tokenize.main, folder / "a.jsonl", "--vocabulary", 300, "--out", folder / "plain")
    vocabulary = Tokenizer.from_file(str(folder / "plain/tokenizer.json"))
    vocabulary.normalizer = normalizers.NFC()
    vocabulary.save(str(folder / "nfc.json"))
    return REFUSED, called(tokenize.main, folder / "a.jsonl", "--vocabulary", folder / "nfc.json", "--out", folder / "out")


@attempt("tokenizers")
def a_held_out_fraction_is_binomial(folder: Path) -> tuple[object, object]:
    """Of 4000 different documents, 8 % within four standard deviations, and none on both sides."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"number {i * i}"}) + "\n" for i in range(4000)))
    called(tokenize.main, folder / "a.jsonl", "--vocabulary", 300, "--validation", 0.08, "--out", folder / "out")
    facts = json.loads((folder / "out/corpus.json").read_text())
    count = facts["val"]["documents"]
    return (True, 4000), (abs(count - 320) < 4 * math.sqrt(4000 * 0.08 * 0.92), count + facts["train"]["documents"])


@attempt("tokenizers")
def no_token_is_added_by_a_template(folder: Path) -> tuple[object, object]:
    """A vocabulary whose template adds a token at both ends: documents are the delimiter and the tokens of the text alone."""
    from tokenizers import Tokenizer, processors

    texts = ["one two three", "two three four five"]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 20))
    called(tokenize.main, folder / "a.jsonl", "--vocabulary", 270, "--out", folder / "plain")
    vocabulary = Tokenizer.from_file(str(folder / "plain/tokenizer.json"))
    plain = {text: vocabulary.encode(text, add_special_tokens=False).ids for text in texts}
    ends = [("<|endoftext|>", 0)]
    vocabulary.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=ends)
    vocabulary.save(str(folder / "v.json"))
    (folder / "b.txt").write_text(texts[1])
    words = ("--validation", folder / "b.txt", "--vocabulary", folder / "v.json", "--out", folder / "out")
    called(tokenize.main, folder / "a.jsonl", *words)
    return [0, *plain[texts[1]]], np.fromfile(folder / "out/val_000000.bin", "<u2", offset=1024).tolist()


class Uniform(nn.Module):
    """Scores of zero for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(300))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.w * self.w.new_ones(*tokens.shape, 1)).flatten(0, 1)


def pipeline_of(block: Callable[[], nn.Module], spec: TensorSpec, **recipe: Any) -> Pipeline:
    """Return a pipeline of one block."""
    return Pipeline(Model("one", (BlockSpec("only", block),)), spec, Recipe(sgd, lambda t: 0.1, **recipe), k=1)


@attempt("evaluation")
def a_uniform_guess_costs_the_bits_of_arithmetic(folder: Path) -> tuple[object, object]:
    """log2(300) bits for each token, divided by the bytes of the held-out text per token, counted in Python."""
    texts = [f"Zürich {i}\r\n\u4e2d\u6587 🙂 " * 5 for i in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "v.jsonl").write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in texts[:20]))
    words = ("--validation", folder / "v.jsonl", "--vocabulary", 300, "--out", folder / "out")
    called(tokenize.main, folder / "a.jsonl", *words)
    tokens = np.fromfile(folder / "out/val_000000.bin", "<u2", offset=1024).size
    size = sum(len(text[::-1].encode()) for text in texts[:20])
    from petra.training.trainer import means

    source = EvalSource(load_dataset("tokens", root=folder / "out", size=16, classes=300), 8)
    found = pipeline_of(Uniform, TensorSpec((8, 16), torch.int64), metrics={}).evaluate(source, source.batches)
    got = means(found, "tokens", source.bytes_per_target)
    return close([math.log(300), 300, math.log2(300) * tokens / size], [got["loss"], got["perplexity"], got["bits_per_byte"]])


@attempt("evaluation")
def statistics_and_padding_are_those_of_a_plain_loop(folder: Path) -> tuple[object, object]:
    """A network with batch norm and dropout, trained a little; 50 samples in batches of 8; loss, accuracy and top 5 by torch."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 3, 8, 8), torch.randint(0, 7, (50,))
    split = from_dataset([*zip(x, y.tolist(), strict=True)])

    def block() -> nn.Module:
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 7)
        return nn.Sequential(*layers)

    pipeline = pipeline_of(block, TensorSpec((8, 3, 8, 8), torch.float32))
    pipeline.train(TrainSource(split, 8, seed=0), 12)
    source, network = EvalSource(split, 8), block().eval()
    network.load_state_dict({key.removeprefix("only."): value for key, value in pipeline.state_dict().items()})
    with torch.no_grad():
        scores = network(x)
    five = np.mean([label in row for label, row in zip(y.tolist(), scores.topk(5).indices.tolist(), strict=True)])
    expected = [float(F.cross_entropy(scores, y)), float((scores.argmax(1) == y).double().mean()), five]
    found = pipeline.evaluate(source, source.batches)
    return close([*expected, 50], [found.loss, found.metrics["accuracy"], found.metrics.get("top5", five), found.targets])


@attempt("evaluation")
def the_mean_iou_is_that_of_sets_of_pixels(folder: Path) -> tuple[object, object]:
    """With a class that occurs nowhere, one that is only predicted, and ignored pixels, in two batches; sets in Python."""
    rng, metric = np.random.default_rng(6), ConfusionMatrix(5)
    targets = rng.choice([0, 1, 2, -100], (4, 6, 7))
    predicted = rng.choice([0, 1, 2, 4], (4, 6, 7))
    scores = F.one_hot(torch.from_numpy(predicted), 5).permute(0, 3, 1, 2).double()
    counts = sum(metric(scores[part], torch.from_numpy(targets[part])) for part in (slice(0, 1), slice(1, 4)))
    pixels = [(i, t, p) for i, (t, p) in enumerate(zip(targets.flatten(), predicted.flatten(), strict=True)) if t != -100]
    shares = []
    for c in range(5):
        a, b = ({i for i, *both in pixels if both[which] == c} for which in (0, 1))
        shares += [len(a & b) / len(a | b)] if a | b else []
    return close(sum(shares) / len(shares), metric.value(counts.tolist()))


@attempt("evaluation")
def other_classes_of_the_same_number_are_refused(folder: Path) -> tuple[object, object]:
    """A run on images of three classes, evaluated on a folder with three others."""
    os.chdir(folder)
    for name in ("d", "other"):
        write_image_folders(folder / name)
    for part in ("train", "val"):
        (folder / "other" / part / "n01").rename(folder / "other" / part / "zebra")
    with redirect_stdout(io.StringIO()):
        train(*IMAGES, *SHORT, "data.root=d", "run_dir=r")
    return REFUSED, called(evaluate.main, "r", "data.root=other")


@attempt("reports")
def the_best_epoch_is_one_with_a_number(folder: Path) -> tuple[object, object]:
    """A first epoch without targets, then 50 % and 40 %: the best is 50 %, in the table and on the page."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()):
        train(*TINY, "k=1", "run_dir=r")
    (row,) = lines(Path("r/metrics.jsonl"))
    values = ((1, None), (2, 0.5), (3, 0.4))
    rows = [row | {"epoch": e, "microbatches": 8 * e, "test_accuracy": value} for e, value in values]
    Path("r/metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in rows))
    Path("r/summary.json").unlink()
    cells = [cell.strip() for cell in called(compare.main, "r").splitlines()[-1].split("|")]
    called(report.main, "r")
    page = re.sub(r"\s+", " ", Path("r/report.html").read_text())
    shown = re.search(r"<b>([^<]*)</b><span>best test accuracy", page)
    return ("40.00%", "50.00%", "50.00%"), (*cells[-3:-1], shown and shown[1])


@attempt("reports")
def learning_rates_of_updates_are_those_of_a_formula(folder: Path) -> tuple[object, object]:
    """Warm-up over half an epoch to lr · 8 · 2 / 256, then half a cosine to the end, at the 4th, 8th, ... of 16 microbatches."""
    os.chdir(folder)
    words = (
        "k=2",
        "run_dir=r",
        "trainer.epochs=2",
        "schedule=cosine",
        "schedule.warmup_epochs=0.5",
        "optim.lr=0.3",
        "optim.scaling=goyal",
    )
    with redirect_stdout(io.StringIO()):
        train(*TINY, *words, "trainer.log_every=2")
    peak = 0.3 * 8 * 2 / 256
    cosine = [peak * 0.5 * (1 + math.cos(math.pi * max(0.0, (t - 1 - 4) / (16 - 4)))) for t in (4, 8, 12, 16)]
    return close(cosine, [row["update/learning_rate"] for row in lines(Path("r/updates.jsonl"))])


@attempt("reports")
def sums_of_updates_are_the_epoch(folder: Path) -> tuple[object, object]:
    """The mean of the losses of all updates of an epoch is the loss of the epoch, and the summary has the last row."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()):
        train(*TINY, "k=2", "run_dir=r", "trainer.log_every=1")
    (row,), summary = lines(Path("r/metrics.jsonl")), json.loads(Path("r/summary.json").read_text())
    mean = np.mean([found["update/loss"] for found in lines(Path("r/updates.jsonl"))])
    return close([mean, row["test_loss"], 8], [row["train_loss"], summary["test_loss"], summary["microbatches"]])


def planned(*words: str) -> tuple[str, dict[str, list[str]]]:
    """Return what ``petra plan`` prints, and the cells of each method."""
    text = called(plan.main, *words)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return text, {name: dict(zip(rows[0], (name, *cells), strict=True)) for name, *cells in rows[2:]}  # type: ignore[misc]


@attempt("plan")
def one_device_needs_three_times_the_flops_of_torchs_counter(folder: Path) -> tuple[object, object]:
    """Backpropagation on one device of 2 TFLOP/s: samples per second from torch's count of a forward pass."""
    model, counter = revnet18(width=0.25).build(0), FlopCounterMode(display=False)
    with counter:
        model(torch.randn(16, 3, 32, 32))
    seconds = 3 * counter.get_total_flops() / 2e12
    words = ("model=revnet18", "model.width=0.25", "data=synthetic", "data.batch_size=16", "--devices", "1", "--teraflops", "2")
    return close(16 / seconds, float(planned(*words)[1]["backprop"]["samples/s"]), 5e-3)  # type: ignore[call-overload]


@attempt("plan")
def messages_have_the_bytes_of_their_tensors(folder: Path) -> tuple[object, object]:
    """Two devices with the cut before the fourth block of RevNet-18: outputs in float32, forward and backward, from hooks."""
    model, sizes = revnet18(width=0.25).build(0), list[int]()
    for block in model.children():
        block.register_forward_hook(
            lambda b, i, out: sizes.append(sum(t.nbytes for t in (out if isinstance(out, tuple) else (out,))))
        )
    model(torch.randn(16, 3, 32, 32))
    words = ("model=revnet18", "model.width=0.25", "data=synthetic", "data.batch_size=16", "--devices", "2")
    text, rows = planned(*words)
    stages = re.search(r"method=1f1b.*trainer\.stages=\[(\d+),", text)
    cut = int(stages[1]) if stages else 0
    return close(2 * sizes[cut - 1] / 1e6, float(rows["1f1b"]["MB per microbatch"]), 5e-3)  # type: ignore[call-overload]


def made(function: Try) -> tuple[str, str]:
    """Return how a try ended, in a folder of its own."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected, found = function(Path(folder))
        finally:
            os.chdir(here)
    return ("right", "") if expected == found else ("WRONG", f"expected {str(expected)[:150]}, got {str(found)[:150]}")


if __name__ == "__main__":
    run_tries(__doc__, {name: (area, partial(made, function)) for name, (area, function) in TRIES.items()})
