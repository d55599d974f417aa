"""Count the words of the pages: ``python -m docs.words`` prints them, and the limits that a test holds.

A word is what spaces separate and has a letter or a digit, so bars and rules of tables are none.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = (
    "docs/configuration.md",
    "docs/families.md",
    "docs/trainer_arguments.md",
    "docs/evidence/papers.md",
    "docs/evidence/staleness_cells.md",
    "docs/evidence/time_to_a_loss_tables.md",
)
"""Pages that programs write, which don't count."""
LIMITS = {
    "docs": 25_000,
    "evidence": 20_000,
    "all": 48_000,
    "README.md": 1_100,
    "docs/design.md": 2_500,
    "docs/huggingface.md": 1_500,
    "docs/what_to_set.md": 1_200,
    "docs/slow_links.md": 1_200,
    "evidence page": 1_500,
}
"""Most words of the pages in docs/ without evidence, of evidence, of all tracked Markdown, and of single pages."""


def words(text: str) -> int:
    """Return the number of words of a text."""
    return sum(re.search(r"\w", word) is not None for word in text.split())


def counted() -> dict[str, int]:
    """Return the words of each page, and of the groups of LIMITS."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pages = {name: words((ROOT / name).read_text(encoding="utf-8")) for name in listed if name not in GENERATED}
    evidence = sum(count for name, count in pages.items() if name.startswith("docs/evidence/"))
    docs = sum(count for name, count in pages.items() if name.startswith("docs/")) - evidence
    return {**pages, "docs": docs, "evidence": evidence, "all": sum(pages.values()), "evidence page": 0}


if __name__ == "__main__":
    for name, count in counted().items():
        print(f"{count:7,} {name}" + (f" (at most {LIMITS[name]:,})" if name in LIMITS else ""))
