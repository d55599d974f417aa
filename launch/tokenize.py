"""Write files of tokens for data=tokens: ``petra tokenize books/*.txt --vocabulary 4096 --out tokens``.

A byte-level BPE vocabulary is trained on the texts, or read from a file (tokenizer.json of Hugging Face's tokenizers)
or from the folder of a checkpoint, which contains one.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from petra.data.files import require_distinct
from petra.data.tokenizer import (
    OPTIONS,
    Division,
    divide,
    documents,
    load_vocabulary,
    require_no_tokens,
    train_vocabulary,
    write_tokens,
)
from petra.data.tokens import PARTS

from .runtime.terminal import command, parser_for, path_argument


@command
def main(arguments: list[str] | None = None) -> None:
    """Tokenize text files, and print the size of the corpus."""
    parser = parser_for(__doc__)
    parser.add_argument(
        "files", nargs="+", type=path_argument, help="text files: one document each, or one per line of JSON objects (key text)"
    )
    parser.add_argument("--out", type=path_argument, required=True, help="folder for the token files")
    parser.add_argument("--vocabulary", default="4096", help="tokens of a new vocabulary, or the file or folder of one (4096)")
    parser.add_argument("--separator", help=r"text between the documents of a file; \n and \t are understood")
    parser.add_argument("--validation", nargs="+", default=["0.05"], help="files, or the fraction of the text for it (0.05)")
    parser.add_argument("--test", nargs="+", help="the same for a test part, which data.split=test evaluates (none)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    separator = None if options.separator is None else options.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    chosen = {part: words for part in OPTIONS if (words := getattr(options, OPTIONS[part].removeprefix("--"))) is not None}
    fractions = {part: fraction for part, words in chosen.items() if (fraction := _fraction(words)) is not None}
    files = {part: [path_argument(word) for word in words] for part, words in chosen.items() if part not in fractions}

    def progress(text: str, paths: list[Path]) -> tqdm[None]:
        size = sum(path.stat().st_size for path in paths if path.exists())
        return tqdm(desc=text, total=size, unit="B", unit_scale=True, disable=None)  # only on a terminal

    require_no_tokens(options.out)
    require_distinct(path for path in sum(files.values(), options.files) if path.exists())
    division = Division({})
    if fractions:
        with progress("division", options.files) as bar:
            division = divide(documents(options.files, separator, bar.update), fractions)
    if options.vocabulary.isdecimal():
        with progress("vocabulary", options.files) as bar:
            vocabulary = train_vocabulary(documents(options.files, separator, bar.update), int(options.vocabulary))
    else:
        vocabulary = load_vocabulary(path_argument(options.vocabulary))
    with progress("tokens", sum(files.values(), options.files)) as bar:
        pieces = (piece for text in documents(options.files, separator, bar.update) for piece in division.pieces(text))
        others = ((part, text) for part, paths in files.items() for text in documents(paths, separator, bar.update))
        facts = write_tokens(chain(pieces, others), ("train", *chosen), vocabulary, options.out)
    if division.inside:
        print("the documents are few: the parts are ends of each document")
    size = sum(facts[part]["bytes"] for part in filter(facts.get, PARTS))
    for part, fraction in fractions.items():
        if not fraction / 2 < (share := facts[part]["bytes"] / size) < 1.5 * fraction:
            print(f"warning: {part} has {share:.0%} of the bytes ({OPTIONS[part]}={fraction})")
    for name in filter(facts.get, PARTS):
        count, tokens, text = (facts[name][key] for key in ("documents", "tokens", "bytes"))
        print(f"{name}: {count:,} documents, {tokens:,} tokens, {text / tokens:.2f} bytes per token")
    print(f"train with: data=tokens data.root={options.out} data.classes={facts['classes']} model.delimiter={facts['delimiter']}")


def _fraction(words: list[str]) -> float | None:
    """Return the fraction that the words are, or None if they are names of files."""
    try:
        return float(" ".join(words))
    except ValueError:
        return None
