"""Write ``docs/trainer_arguments.md``: ``python -m docs.trainer_arguments > docs/trainer_arguments.md``."""

import dataclasses
import re

from transformers import TrainingArguments

from petra.huggingface.arguments import ARGUMENTS, MAPPED, REFUSED

HEADER = """# Arguments of PetraTrainer

What becomes of the fields of `transformers.TrainingArguments` in [`PetraTrainer`](huggingface.md#a-script-for-trainer). Fields that
a subclass adds are not checked. This page is generated from the code.

| fields | here |
|---|---|"""


def page() -> str:
    """Return the page."""
    names = sorted(field.name for field in dataclasses.fields(TrainingArguments) if field.init)
    lines = [HEADER]
    for pattern, meaning in ARGUMENTS.items():
        found = ", ".join(f"`{name}`" for name in names if re.fullmatch(pattern, name))
        lines.append(f"| {found} | {meaning} |")
    others = ", ".join(f"`{name}`" for name in names if not MAPPED.fullmatch(name))
    lines.append(f"| {others} | must have their defaults |")
    return "\n".join([*lines, "", *(f"Values of `{name}` that are refused match `{p}`." for name, p in REFUSED.items()), ""])


if __name__ == "__main__":
    print(page(), end="")
