"""Generate text with the language model of a run, in one process.

``petra generate run=FOLDER prompt="It was" [key=value ...]``

    run          folder of a run with model=revgpt or model=gpt
    prompt       text to continue; empty: a new document, if the vocabulary has a delimiter
    tokens       number of tokens (200)
    temperature  divisor of the logits; 0 takes the most probable token (0.8)
    top_k        draw among this number of most probable tokens
    top_p        draw among the fewest tokens whose probabilities sum to this (1.0)
    seed         seed of the draws (0)
    weights      file of exported weights, or folder of a checkpoint. Default: as in petra evaluate
    --trust      import code outside of petra that the run's configuration names as _target_
    vocabulary   tokenizer.json of the tokens. Default: the one in data.root; bytes for data=text
    device       cpu or cuda (cpu)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch

from petra.data.tokenizer import DELIMITER, VOCABULARY, fingerprint, load_vocabulary
from petra.errors import DataError, ModelError, alternatives, require
from petra.models.generation import Sampling, find_stem, generate

from .config.keys import fields_of
from .config.schema import Config
from .evaluate import dotlist, parse, split
from .run.weights import Weights
from .runtime.agent import this_process
from .runtime.terminal import command, words_or_help

Encode = Callable[[str], list[int]]
Decode = Callable[[Iterable[int]], Iterator[str]]


@dataclass
class Options:
    """Settings of a generation, see the head of this file. ``prompt`` is not among them, because it may be any text."""

    tokens: Annotated[int, ">= 1"] = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: Annotated[int, ">= 0 and < 9223372036854775808"] = 0
    vocabulary: str | None = None
    device: str = "cpu"


OWN = (*(field.name for field in fields(Options)), "prompt")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the prompt and its continuation, token by token."""
    words = words_or_help(arguments, __doc__)
    if words is None:
        return
    with this_process() as process:
        own, others = split(words, OWN)
        prompt = own.pop("prompt", "")
        decoded = not any("\ud800" <= character <= "\udfff" for character in prompt)  # Python's form of bytes that are not UTF-8
        require(decoded, "prompt", "text in UTF-8", ascii(prompt))
        options = read_options([f"{key}={value}" for key, value in own.items()])
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
        _, weights, config = parse(others, process)
        model = weights.network(config).to(torch.device(options.device))
        require(find_stem(model) is not None, "run", "a run of gpt or revgpt", config.model.name, ModelError)
        encode, decode, stop = vocabulary(config, options.vocabulary, weights)
        text = generate(model, encode(prompt), sampling, options.seed, stop)
        print(prompt, end="", flush=True)
        for piece in decode(islice(text, options.tokens)):
            print(piece, end="", flush=True)
        print()


def read_options(words: list[str]) -> Options:
    """Return the settings on the command line.

    Raises:
        ConfigError: If a value has the wrong type or is out of range, or there is no GPU.
    """
    given = dotlist(words)
    found = Options(**{name: key.read(name, given.get(name, key.default)) for name, key in fields_of(Options).items()})
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    require(found.device in devices, "device", alternatives(devices) + " on this machine", found.device)
    return found


def vocabulary(config: Config, path: str | None, weights: Weights | None = None) -> tuple[Encode, Decode, int | None]:
    """Return the functions from text to tokens and back, and the token that ends a text.

    Args:
        config: Configuration of the run.
        path: File of the vocabulary; None for the one of the run's data.
        weights: Weights that must have been trained with this vocabulary, or None.

    Raises:
        PetraError: If the vocabulary is missing, can't be read, or is another one.
    """
    if config.data.name == "text":
        return lambda text: list(text.encode()), _decode_bytes, None
    file = Path(path) if path else Path(config.data.options.get("root") or ".") / VOCABULARY
    tokenizer = load_vocabulary(file)
    size, classes = tokenizer.get_vocab_size(), config.data.classes
    require(size <= classes, str(file), f"a vocabulary of at most {classes} tokens, the run's data.classes", size, DataError)
    if weights is not None:
        weights.require_vocabulary(str(file), fingerprint(tokenizer))
    delimiter = tokenizer.token_to_id(DELIMITER)
    first = [] if delimiter is None else [delimiter]

    def decode(tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of the tokens, each character once it is complete."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        yield from filter(None, (stream.step(tokenizer, token) for token in tokens))

    return lambda text: [*first, *tokenizer.encode(text, add_special_tokens=False).ids], decode, delimiter


def _decode_bytes(tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of UTF-8 bytes, each character once it is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(bytes([token]))


if __name__ == "__main__":
    main()
