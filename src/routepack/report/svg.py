"""Drawings of a report: SVG that scales to its column without scaling its text. Everything is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

CLASSES = 9
"""Steps of the sequential palette."""
MOST_RANKS, MOST_MICROBATCHES = 128, 48
"""Rows and columns that a heat map draws; of more, neighbours share one and the busiest of them shows."""
MOST_HINTS = 400
"""Cells up to which each says its own figure when pointed at."""


PLAIN = "\n\u00a0\u202f"
"""White space that is no trick, though Python counts it as unprintable."""


def clean(text: str, most: int = 300) -> str:
    """*text* without what cannot be shown, or would hide what is, and not endlessly long.

    >>> clean("a\\x00b\\u202ec")
    'a�b�c'
    """
    shown = "".join(character if character.isprintable() or character in PLAIN else "\ufffd" for character in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "…"


def tag(name: str, *children: str, **attributes: Any) -> Markup:
    """An element: children that are no Markup are text; ``class_`` and ``aria_label`` lose and change underscores."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    keep = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}
    text = Markup("").join(Markup(' {}="{}"').format(Markup(keep.get(key, key)), str(given[key])) for key in given)
    inner = Markup("").join(child if isinstance(child, Markup) else escape(clean(child)) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), text, inner)


def bar(parts: Sequence[tuple[str, str, float]], total: float, label: str) -> Markup:
    """A stacked bar: (CSS class, what it says, value) each, as shares of *total*."""
    drawn, at = [], 0.0
    for name, says, value in parts:
        if value > 0:
            width = 100.0 * value / total
            drawn.append(
                tag("rect", tag("title", says), class_=name, x=f"{at:.3f}%", y="0", width=f"{width:.3f}%", height="100%")
            )
            at += width
    return tag("svg", tag("title", label), *drawn, class_="bar", role="img", aria_label=label)


def shown_cells(busy_DM: np.ndarray) -> np.ndarray:
    """[rows, columns]: the busiest of the neighbours that share a cell of the drawing."""
    for axis, most in ((0, MOST_RANKS), (1, MOST_MICROBATCHES)):
        share = -(-busy_DM.shape[axis] // most)
        starts = np.arange(0, busy_DM.shape[axis], share)
        busy_DM = np.maximum.reduceat(busy_DM, starts, axis=axis)
    return busy_DM


def steps(lowest: float, highest: float) -> np.ndarray:
    """float64 [CLASSES + 1]: where the palette's steps begin and end."""
    return np.linspace(lowest, highest if highest > lowest else lowest + 1.0, CLASSES + 1)


def heat_map(busy_DM: np.ndarray, edges: np.ndarray, label: str) -> Markup:
    """Rank x microbatch, darker for more; one path a step of the palette, so that thousands of cells stay small."""
    cells = shown_cells(busy_DM)
    step = np.clip(np.searchsorted(edges, cells, side="right") - 1, 0, CLASSES - 1)
    rows, columns = cells.shape
    drawn = [tag("path", class_=f"h{shade}", d=path) for shade in range(CLASSES) if (path := "".join(_runs(step == shade)))]
    if cells.size <= MOST_HINTS and cells.shape == busy_DM.shape:
        drawn += [
            tag(
                "rect",
                tag("title", f"rank {d}, microbatch {m}: {busy_DM[d, m]:.3f}"),
                class_="hint",
                x=m,
                y=d,
                width=1,
                height=1,
            )
            for d in range(rows)
            for m in range(columns)
        ]
    # The height follows the ranks, within what a page holds; text stays outside, where nothing stretches it.
    height = min(320, max(96, 14 * rows))
    return tag(
        "svg", tag("title", label), *drawn, class_="heat", role="img", aria_label=label, viewbox=f"0 0 {columns} {rows}",
        preserveaspectratio="none", style=f"height:{height}px",
    )  # fmt: skip


def _runs(here: np.ndarray) -> list[str]:
    """Rectangles of True cells, merged along the longer axis."""
    found = []
    across = here.shape[1] >= here.shape[0]
    for line, row in enumerate(here if across else here.T):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            long = end - start
            found.append(f"M{start} {line}h{long}v1h-{long}z" if across else f"M{line} {start}v{long}h1v-{long}z")
    return found


def layer_chart(
    layer_ids: Sequence[int], before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]], label: str
) -> Markup:
    """Fullest EP rank over the mean, layer by layer: (summed, worst unit) before and after."""
    height, foot = 240, 24
    top = max(1.02, *(worst for _, worst in (*before, *after)))
    ticks = _ticks(1.0, top)
    # Room above the highest mark for its number, which stands on its line.
    ceiling = top + 0.09 * (top - 1.0)

    def y(value: float) -> str:
        return f"{(height - foot) * (ceiling - value) / (ceiling - 1.0) + 1:.1f}"

    drawn = []
    for tick in ticks:
        drawn.append(tag("line", class_="grid", x1="0", x2="100%", y1=y(tick), y2=y(tick)))
        drawn.append(tag("text", f"{tick:g}", class_="tick", x="0", y=f"{float(y(tick)) - 3:.1f}"))
    count = len(layer_ids)
    for index, name in enumerate(layer_ids):
        x = f"{8.0 + 90.0 * (index + 0.5) / count:.2f}%"
        (mean0, worst0), (mean1, worst1) = before[index], after[index]
        drawn.append(
            tag(
                "g",
                tag(
                    "title",
                    f"layer {name}: before {mean0:.3f} (worst microbatch {worst0:.3f}), after {mean1:.3f} ({worst1:.3f})",
                ),
                tag("line", class_="whisker before", x1=x, x2=x, y1=y(mean0), y2=y(worst0)),
                tag("line", class_="whisker after", x1=x, x2=x, y1=y(mean1), y2=y(worst1)),
                tag("circle", class_="before", cx=x, cy=y(mean0), r="3.4"),
                tag("circle", class_="after", cx=x, cy=y(mean1), r="3.4"),
            )
        )
        if index in _named(count):
            drawn.append(tag("text", str(name), class_="tick middle", x=x, y=height - 6))
    return tag("svg", tag("title", label), *drawn, class_="layers", role="img", aria_label=label, style=f"height:{height}px")


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from *low* up."""
    rough = (high - low) / 4
    size = 10 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [round(low + step * k, 10) for k in range(int((high - low) / step + 1e-9) + 1)]


def _named(count: int) -> set[int]:
    """Which layers have their number below: all of few, else about eight."""
    step = max(1, -(-count // 8))
    return set(range(0, count, step))
