"""Parts of an HTML page in one file: diagrams as inline SVG, tables, and a style for screens of any width, light and dark.

The page needs no network and no scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from petra.analysis.plots import Panel, line_colours, panel_svg

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1c2026; --soft: #5b6470; --line: #d9dde3; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --card: #1d2126; --text: #e6e9ee; --soft: #9aa4b1; --line: #343b44; }
  .grid svg, i { filter: brightness(1.15); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.6rem; }
p { margin: 0.3rem 0 0.8rem; max-width: 46rem; color: var(--soft); }
.grid { display: grid; gap: 0.8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.tiles { display: grid; gap: 0.6rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); margin: 1rem 0; }
.tiles div, figure, .scroll, details { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; }
.tiles div { padding: 0.5rem 0.8rem; }
.tiles b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.tiles span, figcaption { color: var(--soft); font-size: 0.85rem; }
figure { margin: 0; padding: 0.5rem; }
figcaption, .legend { display: flex; flex-wrap: wrap; gap: 0.1rem 0.9rem; padding: 0 0.4rem; font-size: 0.85rem; }
.legend { margin-bottom: 0.6rem; }
i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 0.2em; margin-right: 0.35em; }
svg { display: block; width: 100%; height: auto; color: var(--text); }
svg text { fill: var(--text); }
.scroll { overflow-x: auto; }
.wide svg { min-width: 60rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; }
th.text, td.text { text-align: left; }
details { padding: 0.5rem 0.8rem; margin-top: 2rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: 0.8rem; }
"""
MOST_POINTS = 400
"""Points of a line in a diagram. Of longer lines, every n-th point is drawn."""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a complete page."""
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def heading(title: str, text: str = "", level: int = 2) -> str:
    """Return a heading, and a paragraph unless ``text`` is empty."""
    return f"<h{level}>{escape(title)}</h{level}>" + (f"<p>{escape(text)}</p>" if text else "")


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return numbers side by side; ``values`` are pairs (name, value)."""
    return '<div class="tiles">' + "".join(f"<div><b>{escape(v)}</b><span>{escape(n)}</span></div>" for n, v in values) + "</div>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = ()) -> str:
    """Return a table, which scrolls on narrow screens. Columns named in ``text`` are aligned to the left."""
    kinds = [' class="text"' if name in text else "" for name in header]

    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>"

    return f'<div class="scroll"><table>{line("th", header)}{"".join(line("td", row) for row in rows)}</table></div>'


def diagrams(panels: Iterable[Panel], *, shaded: bool = False) -> str:
    """Return diagrams side by side, each with its own legend, or with ``shaded`` one legend for all."""
    panels = [_thinned(panel) for panel in panels]
    figures = "".join(
        f"<figure>{panel_svg(panel, shaded=shaded)}"
        + ("" if shaded or len(panel.lines) < 2 else f"<figcaption>{_legend(panel, shaded)}</figcaption>")
        + "</figure>"
        for panel in panels
    )
    longest = max(panels, key=lambda panel: len(panel.lines), default=None)
    shared = f'<div class="legend">{_legend(longest, shaded)}</div>' if shaded and longest is not None else ""
    return f'{shared}<div class="grid">{figures}</div>'


def wide(svg: str) -> str:
    """Return a picture that keeps a minimum width and scrolls on narrow screens."""
    return f'<figure class="scroll wide">{svg}</figure>'


def folded(title: str, text: str) -> str:
    """Return preformatted text that opens on a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _legend(panel: Panel, shaded: bool) -> str:
    found = []
    for default, name in zip(line_colours(len(panel.lines), shaded=shaded), panel.lines, strict=True):
        colour: Any = panel.styles.get(name, {}).get("color", default)
        value = colour if isinstance(colour, str) else f"rgb({', '.join(f'{255 * part:.0f}' for part in colour)})"
        opacity = panel.styles.get(name, {}).get("alpha", 1)
        found.append(f'<span><i style="background: {value}; opacity: {opacity}"></i>{escape(name)}</span>')
    return "".join(found)


def _thinned(panel: Panel) -> Panel:
    lines = {name: [*points[:: -(-len(points) // MOST_POINTS) or 1]] for name, points in panel.lines.items()}
    return replace(panel, lines=lines)
