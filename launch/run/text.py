"""Text of a language model: between characters and tokens, and a sample after each epoch."""

from __future__ import annotations

from codecs import iterdecode
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from petra.data.tokenizer import VOCABULARY, classes_of, delimiter_of, fingerprint, load_vocabulary
from petra.distributed import raise_on_all_ranks
from petra.errors import DataError, require
from petra.models.generation import Sampling, find_stem, generate
from petra.pipeline import Pipeline
from petra.training.weight_files import gathered_blocks

from ..config.schema import Config

Encode = Callable[[str], list[int]]
Decode = Callable[[Iterable[int]], Iterator[str]]
SAMPLE = "sample"
"""Name of the sample in the row of an epoch."""
TEMPERATURE = 0.8
MOST_PARAMETERS = 500_000_000
"""Networks with more have no sample: the first process would need their memory on the CPU."""


class TextSample:
    """Writes a text with the weights of a pipeline. Every process must make the same calls.

    The process of the first stage copies the whole network to the CPU, and generates the text there.

    Args:
        pipeline: This process's part of the pipeline.
        config: Configuration of the run.
        tokens: Length of the text.
        trained: Fingerprint of the vocabulary of the data, or None if it is unknown.

    Raises:
        PetraError: If the vocabulary can't be read. Raised in every process.
    """

    def __init__(self, pipeline: Pipeline, config: Config, tokens: int, trained: str | None) -> None:
        self._pipeline, self._tokens, self._seed = pipeline, tokens, config.seed
        with raise_on_all_ranks():
            if pipeline.rank == 0:  # other machines may lack the files of the data set

                def check(name: str, found: str) -> None:
                    require(trained in (None, found), name, "the vocabulary of corpus.json beside it", "another", DataError)

                encode, self._decode, self._stop = vocabulary(config, None, check)
                self._start = encode("") or encode("\n")

    def __call__(self) -> dict[str, str]:
        """Return the text as an entry of an epoch's row in the process of the first stage, if it can generate one."""
        with self._pipeline.averaged():
            state = {f"{name}.{key}": value for name, block in gathered_blocks(self._pipeline) for key, value in block.items()}
        found = dict[str, str]()
        with raise_on_all_ranks():  # if a logit is not finite
            if self._pipeline.rank == 0:
                network = self._pipeline.plan.model.build(self._seed)
                network.load_state_dict(state)
                if find_stem(network) is not None:
                    text = generate(network.eval(), self._start, Sampling(TEMPERATURE), self._seed, self._stop)
                    found[SAMPLE] = "".join(self._decode(islice(text, self._tokens)))
        return found


def vocabulary(config: Config, path: Path | None, check: Callable[[str, str], None]) -> tuple[Encode, Decode, int | None]:
    """Return the functions from text to tokens and back, and the token that ends a text.

    Args:
        config: Configuration of the run.
        path: File of the vocabulary; None for the one of the run's data.
        check: Raises if it is not the vocabulary of what is used with it, given the name and the fingerprint.

    Raises:
        PetraError: If the vocabulary is missing, can't be read, or is another one.
    """
    if config.data.name == "text":
        require(path is None, "--vocabulary", "none for a run on bytes (data=text)", path)
        return lambda text: [*text.encode()], lambda ids: iterdecode((bytes([min(t, 255)]) for t in ids), "utf-8", "replace"), None
    file = path or Path(config.data.options.get("root") or ".") / VOCABULARY
    tokenizer = load_vocabulary(file)
    size, classes = classes_of(tokenizer), config.data.classes
    require(size <= classes, str(file), f"tokens less than {classes}, the run's data.classes", size - 1, DataError)
    check(str(file), fingerprint(tokenizer))
    delimiter, masked = delimiter_of(tokenizer), config.model.options.get("delimiter")
    require(masked is None or delimiter in (None, masked), "model.delimiter", f"null or {delimiter}, as in {file}", masked)
    first = [] if delimiter is None else [delimiter]

    def decode(tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of the tokens, each character once it is complete."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        yield from filter(None, (stream.step(tokenizer, token) for token in tokens))

    return lambda text: [*first, *tokenizer.encode(text, add_special_tokens=False).ids], decode, delimiter
