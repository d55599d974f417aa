"""Generate text with the language model of a run, in one process."""

from __future__ import annotations

from itertools import islice

import torch

from petra.errors import ModelError, alternatives, require
from petra.models.generation import Sampling, find_stem, generate

from .evaluate import read_run, run_parser
from .run.text import vocabulary
from .runtime.agent import this_process
from .runtime.terminal import command, path_argument


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
    parser.add_argument(
        "--vocabulary", type=path_argument, help="tokenizer.json of the tokens (the one in data.root; bytes for data=text)"
    )
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
        weights, config = read_run(options, options.words, process, ("model", "data"))  # the device is a flag
        model = weights.network(config).to(torch.device(options.device))
        require(find_stem(model) is not None, "command line", "a run of a language model", config.model.name, ModelError)
        encode, decode, stop = vocabulary(config, options.vocabulary, weights.require_vocabulary)
        text = generate(model, encode(options.prompt), sampling, options.seed, stop)
        print(options.prompt, end="", flush=True)
        for piece in decode(islice(text, options.tokens)):
            print(piece, end="", flush=True)
        print()
