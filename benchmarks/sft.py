"""Fine-tune a pre-trained model by TRL's own script: ``python -m benchmarks.sft MODEL TEXTS --out RECORDS``.

MODEL is a folder of a Hugging Face checkpoint; TEXTS has ``novels_train.txt``, ``novels_valid.txt`` and ``novels_test.txt``, with
a paragraph per line and three line ends between books. Each method runs ``trl/scripts/sft.py``, in which only the class is
another one, with LoRA and the options of TRL's recipe; ``plain`` is SFTTrainer. Records have the losses, and the scores of
``lm-eval`` on two tasks over the test part, also for the model before training: the bits per byte of passages, and the choice of
the paragraph that follows among four. Needs ``petra[trl]`` and ``lm-eval``.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import recorded
from benchmarks.report import machine
from launch.run.folder import records_in
from launch.runtime.terminal import command
from petra.training.records import write_text_atomically

UPDATES, K, TOKENS = 100, 4, 256
"""Updates of a run, rows of an update (one per microbatch), and tokens of a row."""
PROCESSES = 4
OPTIONS = (
    f"--max_steps {UPDATES} --gradient_accumulation_steps {K} --max_length {TOKENS} --per_device_train_batch_size 1 --packing "
    "--per_device_eval_batch_size 1 --learning_rate 2e-4 --use_peft --lora_r 32 --lora_alpha 16 --lora_dropout 0 --dtype float32 "
    f"--bf16 false --use_cpu --seed 0 --logging_steps 1 --eval_strategy steps --eval_steps {UPDATES // 2} --save_steps {UPDATES} "
    "--report_to none --dataloader_num_workers 0 --disable_tqdm true --eos_token <|im_end|>"
).split()
"""Those of TRL's recipe for LoRA, with rows and updates that two processor cores can train, and without bf16."""
PASSAGE, CONTEXT, CHOICE = 900, 500, 160
"""Most characters of a passage, of what is before a choice, and of a choice."""
ROWS = {"train": 800, "valid": 24, "test": 64}
"""Passages of each part, at equal distances."""
QUESTIONS = 120
ORDER = ("before", "plain", "1f1b", "dsp")
"""Rows of the table: before training, SFTTrainer, and petra."""


def spaced(items: list[Any], count: int) -> list[Any]:
    """Return ``count`` of the items, at equal distances."""
    return [items[i * len(items) // count] for i in range(count)]


def passages(text: str) -> list[str]:
    """Return runs of whole paragraphs of a book, of at most PASSAGE characters."""
    found = [""]
    for paragraph in text.splitlines():
        if len(found[-1]) + len(paragraph) >= PASSAGE:
            found.append("")
        found[-1] += ("\n" if found[-1] else "") + paragraph[: PASSAGE - 1]
    return [passage for passage in found if passage]


def questions(books: list[str]) -> Iterator[dict[str, Any]]:
    """Yield QUESTIONS questions: a paragraph, the beginning of the one that follows, and of three paragraphs of other books."""
    draw, paragraphs = random.Random(0), [[line for line in book.splitlines() if len(line) > CHOICE] for book in books]
    places = [(b, i) for b, lines in enumerate(paragraphs) for i in range(len(lines) - 1)]
    for b, i in spaced(places, QUESTIONS):
        others = draw.sample([lines for o, lines in enumerate(paragraphs) if o != b and lines], 3)
        choices = [line[:CHOICE] for line in (paragraphs[b][i + 1], *map(draw.choice, others))]
        right = choices[0]
        draw.shuffle(choices)
        yield {"context": paragraphs[b][i][-CONTEXT:], "choices": choices, "label": choices.index(right)}


def write_data(texts: Path, out: Path) -> None:
    """Write the passages of each part and the questions as JSON lines. The script reads all files of ``texts``."""
    (out / "texts").mkdir(parents=True, exist_ok=True)
    books = {part: (texts / f"novels_{part}.txt").read_text(encoding="utf-8").split("\n\n\n") for part in ROWS}
    found = {part: [passage for book in books[part] for passage in passages(book)] for part in ROWS}
    rows = {part: [{"text": passage} for passage in spaced(found[part], count)] for part, count in ROWS.items()}
    files = {"texts/train": rows["train"], "texts/valid": rows["valid"], "passages": rows["test"]}
    files["questions"] = [*questions(books["test"])]
    for name, lines in files.items():
        write_text_atomically(out / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def tasks(out: Path) -> list[dict[str, Any]]:
    """Return the two tasks in the form of ``lm-eval``."""

    def task(name: str, output: str, metric: str, **settings: Any) -> dict[str, Any]:
        files = {"data_files": {"test": str(out / f"{name}.jsonl")}}
        data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        return {"task": f"novels_{name}", "output_type": output, "metric_list": [{"metric": metric}], **data, **settings}

    choice = {"doc_to_text": "{{context}}", "doc_to_choice": "choices", "doc_to_target": "label", "target_delimiter": "\n"}
    return [
        task("passages", "loglikelihood_rolling", "bits_per_byte", doc_to_text="", doc_to_target="text"),
        task("questions", "multiple_choice", "acc", **choice),
    ]


def scores(model: str, out: Path, adapter: Path | None = None) -> dict[str, float]:
    """Return what ``lm-eval`` measures of a model, with an adapter if there is one."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]

    settings = {"pretrained": model, "dtype": "float32"} | ({} if adapter is None else {"peft": str(adapter)})
    found = simple_evaluate("hf", settings, tasks=tasks(out), device="cpu", batch_size=1, bootstrap_iters=0)["results"]
    return {"bits_per_byte": found["novels_passages"]["bits_per_byte,none"], "accuracy": found["novels_questions"]["acc,none"]}


def train(method: str, model: str, out: Path) -> dict[str, Any]:
    """Run TRL's script in processes of its own, and return its losses and the scores of what it saved."""
    folder, start = out / f"{method}_run", time.monotonic()
    processes = 1 if method == "plain" else PROCESSES
    launcher = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    script = ["benchmarks.sft", "--method", method, model, str(out / "texts"), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", *launcher, *script], check=True)
    history = json.loads((folder / f"checkpoint-{UPDATES}" / "trainer_state.json").read_text())["log_history"]
    return {
        "method": method,
        "processes": processes,
        "seconds": time.monotonic() - start,
        "losses": [row["loss"] for row in history if "loss" in row],
        "validation": [row["eval_loss"] for row in history if "eval_loss" in row],
        "norms": [row["grad_norm"] for row in history if "grad_norm" in row],
        **({} if method == "plain" else scores(model, out, folder)),
        **machine(),
    }


def run_script(method: str, model: str, texts: str, out: Path) -> None:
    """Run TRL's script in this process, with another class than SFTTrainer unless the method is ``plain``."""
    import trl  # type: ignore[import-not-found]
    from transformers import set_seed

    from petra.huggingface import pipelined

    set_seed(0)  # SFTTrainer draws the adapters before Trainer sets the seed

    if method != "plain":
        trl.SFTTrainer = partial(pipelined(trl.SFTTrainer), method=method)
    sys.argv = ["sft.py", "--model_name_or_path", model, "--dataset_name", texts, "--output_dir", str(out), *OPTIONS]
    sys.argv += ["--dataset_test_split", "validation"]
    runpy.run_path(str(Path(trl.__file__).parent / "scripts" / "sft.py"), run_name="__main__")


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the records. Differences are relative ones from ``plain``, the largest of all updates.

    Methods with late gradients have no norm of all stages.
    """
    rows = {row["method"]: row for row in found}
    lines = ["| method | processes | validation loss | bits per byte | accuracy | difference of losses | of gradient norms |"]
    lines.append("|---" * 7 + "|")
    for name in sorted(rows, key=[*ORDER, *rows].index):
        row, cells = rows[name], [name]
        cells += [str(row.get("processes", "")), f"{row['validation'][-1]:.4f}" if "validation" in row else ""]
        cells += [f"{row['bits_per_byte']:.4f}", f"{row['accuracy']:.3f}"] if "accuracy" in row else ["", ""]
        compared = "plain" in rows and name not in ORDER[:2]
        cells += [_apart(row, rows["plain"], key) if compared and row[key] else "" for key in ("losses", "norms")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _apart(row: dict[str, Any], other: dict[str, Any], key: str) -> str:
    return f"{max(abs(a - b) / b for a, b in zip(row[key], other[key], strict=True)):.1e}"


@command
def main() -> None:
    """Train and evaluate each method, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("texts", help="folder of the texts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; or a file of them, which is only read")
    parser.add_argument("--methods", nargs="*", default=ORDER[1:], help="plain is SFTTrainer in one process")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        run_script(args.method, args.model, args.texts, args.out)
        return
    if args.out.suffix != ".jsonl":
        write_data(Path(args.texts), args.out)
    recorded(args.out, "before", lambda: {"method": "before", **scores(args.model, args.out), **machine()})
    for method in args.methods:
        recorded(args.out, method, partial(train, method, args.model, args.out))
    print(table([*records_in(args.out).values()]))


if __name__ == "__main__":
    main()
