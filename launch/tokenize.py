"""Write files of tokens for data=tokens: ``petra tokenize books/*.txt --vocabulary 4096 --out tokens``.

A byte-level BPE vocabulary is trained on the texts, or read from a file (tokenizer.json of Hugging Face's tokenizers).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tqdm import tqdm

from petra.data.tokenizer import documents, held_out_share, load_vocabulary, train_vocabulary, write_tokens

from .runtime.terminal import command


@command
def main(arguments: list[str] | None = None) -> None:
    """Tokenize text files, and print the size of the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="text files: one document each, or one per line in *.jsonl (key text)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the token files")
    parser.add_argument("--vocabulary", default="4096", help="number of tokens of a new vocabulary, or the file of one (4096)")
    parser.add_argument("--separator", help=r"text between the documents of a file; \n and \t are understood")
    parser.add_argument(
        "--validation", nargs="+", default=["0.01"], help="files, or the fraction of the documents for it, at least one (0.01)"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenize(options)


def tokenize(options: argparse.Namespace) -> None:
    """Train or read the vocabulary, and write the tokens.

    Raises:
        PetraError: If a value is out of range, or a file can't be read or written.
    """
    separator = None if options.separator is None else options.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    fraction = _fraction(options.validation)
    held_out = [] if fraction is not None else [Path(word) for word in options.validation]

    def progress(text: str, paths: list[Path]) -> tqdm[None]:
        size = sum(path.stat().st_size for path in paths if path.exists())
        return tqdm(desc=text, total=size, unit="B", unit_scale=True)

    if fraction is not None:
        with progress("division", options.files) as bar:
            fraction = held_out_share(documents(options.files, separator, bar.update), fraction)
    if options.vocabulary.isdecimal():
        with progress("vocabulary", options.files) as bar:
            vocabulary = train_vocabulary(documents(options.files, separator, bar.update), int(options.vocabulary))
    else:
        vocabulary = load_vocabulary(Path(options.vocabulary))
    with progress("tokens", options.files + held_out) as bar:
        validation = documents(held_out, separator, bar.update) if fraction is None else fraction
        facts = write_tokens(documents(options.files, separator, bar.update), vocabulary, options.out, validation)
    for name in ("train", "val"):
        part = facts[name]
        mean = part["bytes"] / part["tokens"]
        print(f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, {mean:.2f} bytes per token")
    print(f"train with: data=tokens data.root={options.out} data.classes={facts['classes']} model.delimiter={facts['delimiter']}")


def _fraction(words: list[str]) -> float | None:
    """Return the fraction that the words are, or None if they are names of files."""
    try:
        (word,) = words
        return float(word)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
