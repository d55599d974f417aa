"""Write ``docs/families.md``: ``python -m docs.families > docs/families.md``."""

from petra.huggingface.families import COMMAND, DECODERS, OTHERS, REFUSED, VERSION

HEADER = f"""# Decoders of transformers

Decoders of transformers {VERSION} whose `base_model_pp_plan` is `embed_tokens`, `layers`, `norm`.
`{COMMAND}` makes a random model of each, with the defaults of its family reduced in size only, and
compares logits, loss and all gradients of petra's blocks with those of the model: float64, 1e-10, for whole rows, padding at both
ends, and packed documents. Where the model itself has NaN in float64 (eager attention), or lets packed documents see each other, it
compares in float32, or with documents alone, to 1e-5. With names of classes, it checks these only. This page is generated from the
command's output.
"""


def page() -> str:
    """Return the page."""
    accepted = ", ".join(f"`{name}`" for name in DECODERS)
    lines = [
        HEADER,
        f"{len(DECODERS)} of {len(DECODERS) + len(REFUSED)} are accepted: {accepted}.",
        "",
        "| refused | reason |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {reason.replace('|', '/').replace('<', '&lt;')} |" for name, reason in (REFUSED | OTHERS).items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
