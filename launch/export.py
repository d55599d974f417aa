"""Write the weights of a run as a checkpoint of Hugging Face's transformers: ``petra export RUN --huggingface FOLDER``."""

from __future__ import annotations

from petra.errors import require

from .evaluate import read_run, run_parser
from .runtime.agent import this_process
from .runtime.terminal import command, path_argument


@command
def main(arguments: list[str] | None = None) -> None:
    """Write the checkpoint, in one process."""
    parser = run_parser(__doc__)
    parser.add_argument(
        "--huggingface", type=path_argument, required=True, metavar="FOLDER", help="folder of the checkpoint, new or empty"
    )
    options = parser.parse_intermixed_args(arguments)
    with this_process() as process:
        weights, config = read_run(options, options.words, process, ("model",))
        expected = "a run with model=huggingface (trainer.export=safetensors writes the weights of any run)"
        require(config.model.name == "huggingface", "command line", expected, config.model.name)
        from petra.huggingface import save_pretrained

        chosen = config.model.options
        save_pretrained(chosen["path"], weights.read(), options.huggingface, chosen["lora"])
        print(f"AutoModelForCausalLM.from_pretrained({str(options.huggingface)!r}) loads the weights")
