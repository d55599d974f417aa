"""Generate text with the language model of a run, in one process."""

from __future__ import annotations

from codecs import iterdecode
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from petra.data.tokenizer import VOCABULARY, delimiter_of, fingerprint, load_vocabulary
from petra.errors import DataError, ModelError, alternatives, require
from petra.models.generation import Sampling, find_stem, generate

from .config.schema import Config
from .evaluate import read_run, run_parser
from .run.weights import SavedWeights
from .runtime.agent import this_process
from .runtime.terminal import command

Encode = Callable[[str], list[int]]
Decode = Callable[[Iterable[int]], Iterator[str]]


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the prompt and its continuation, token by token."""
    parser = run_parser(__doc__)
    parser.add_argument("--prompt", default="", help="text to continue; empty: a new document, if the vocabulary has a delimiter")
    parser.add_argument("--tokens", type=int, default=200, help="number of tokens (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="divisor of the logits; 0: the most probable token (0.8)")
    parser.add_argument("--top-k", type=int, help="draw among this number of most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the fewest with this sum of probabilities (1.0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    parser.add_argument("--vocabulary", help="tokenizer.json of the tokens (the one in data.root; bytes for data=text)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    options = parser.parse_intermixed_args(arguments)
    require(options.tokens >= 1, "--tokens", "an integer >= 1", options.tokens)
    require(0 <= options.seed < 2**63, "--seed", "an integer >= 0 and < 2^63", options.seed)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    require(options.device in devices, "--device", alternatives(devices) + " on this machine", options.device)
    decoded = options.prompt.encode(errors="ignore").decode() == options.prompt  # Python keeps other bytes as surrogates
    require(decoded, "--prompt", "text in UTF-8", ascii(options.prompt))
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    with this_process() as process:
        weights, config = read_run(options, options.words, process)
        model = weights.network(config).to(torch.device(options.device))
        require(find_stem(model) is not None, "command line", "a run of a language model", config.model.name, ModelError)
        encode, decode, stop = vocabulary(config, options.vocabulary, weights)
        text = generate(model, encode(options.prompt), sampling, options.seed, stop)
        print(options.prompt, end="", flush=True)
        for piece in decode(islice(text, options.tokens)):
            print(piece, end="", flush=True)
        print()


def vocabulary(config: Config, path: str | None, weights: SavedWeights) -> tuple[Encode, Decode, int | None]:
    """Return the functions from text to tokens and back, and the token that ends a text.

    Args:
        config: Configuration of the run.
        path: File of the vocabulary; None for the one of the run's data.
        weights: Weights that must have been trained with this vocabulary.

    Raises:
        PetraError: If the vocabulary is missing, can't be read, or is another one.
    """
    if config.data.name == "text":
        require(path is None, "--vocabulary", "none for a run on bytes (data=text)", path)
        return lambda text: list(text.encode()), lambda tokens: iterdecode((bytes([t]) for t in tokens), "utf-8", "replace"), None
    file = Path(path) if path else Path(config.data.options.get("root") or ".") / VOCABULARY
    tokenizer = load_vocabulary(file)
    size, classes = tokenizer.get_vocab_size(), config.data.classes
    require(size <= classes, str(file), f"a vocabulary of at most {classes} tokens, the run's data.classes", size, DataError)
    weights.require_vocabulary(str(file), fingerprint(tokenizer))
    delimiter, masked = delimiter_of(tokenizer), config.model.options.get("delimiter")
    require(masked is None or delimiter in (None, masked), "model.delimiter", f"null or {delimiter}, as in {file}", masked)
    first = [] if delimiter is None else [delimiter]

    def decode(tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of the tokens, each character once it is complete."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        yield from filter(None, (stream.step(tokenizer, token) for token in tokens))

    return lambda text: [*first, *tokenizer.encode(text, add_special_tokens=False).ids], decode, delimiter


if __name__ == "__main__":
    main()
