"""Where everything of a report's drawings stands; plan_page_drawings.html.j2 draws it.

A drawing scales to its column without scaling its text: x is in percent or in cells, and text stands beside what stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CLASSES = 9
"""Steps of the sequential palette."""
MOST_RANKS, MOST_MICROBATCHES = 128, 48
"""Rows and columns that a heat map draws; of more, neighbours share one and the busiest of them shows."""
MOST_HINTS = 400
"""Cells up to which each says its own figure when pointed at."""
HEIGHT, FOOT = 240, 24
"""Pixels of the chart of layers, and of the room below it for their numbers."""


def shown_cells(busy_DM: np.ndarray) -> np.ndarray:
    """[rows, columns]: the busiest of the neighbours that share a cell of the drawing."""
    for axis, most in ((0, MOST_RANKS), (1, MOST_MICROBATCHES)):
        share = -(-busy_DM.shape[axis] // most)
        busy_DM = np.maximum.reduceat(busy_DM, np.arange(0, busy_DM.shape[axis], share), axis=axis)
    return busy_DM


def steps(lowest: float, highest: float) -> np.ndarray:
    """float64 [CLASSES + 1]: where the palette's steps begin and end."""
    return np.linspace(lowest, highest if highest > lowest else lowest + 1.0, CLASSES + 1)


def heat_map(busy_DM: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    """Rank x microbatch: one path for each step of the palette, so that thousands of cells stay small; and hints for few."""
    cells = shown_cells(busy_DM)
    step = np.clip(np.searchsorted(edges, cells, side="right") - 1, 0, CLASSES - 1)
    paths = ["".join(_runs(step == shade)) for shade in range(CLASSES)]
    with_hints = cells.size <= MOST_HINTS and cells.shape == busy_DM.shape
    return {
        "rows": cells.shape[0],
        "columns": cells.shape[1],
        "paths": [(shade, path) for shade, path in enumerate(paths) if path],
        "hints": [(rank, m, float(busy_DM[rank, m])) for rank, m in np.ndindex(busy_DM.shape)] if with_hints else [],
    }


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
    layer_ids: Sequence[int], before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Fullest EP rank over the mean, layer by layer: (summed, worst unit) before and after."""
    top = max(1.02, *(worst for _, worst in (*before, *after)))
    # Room above the highest mark for its number, which stands on its line.
    ceiling = top + 0.09 * (top - 1.0)
    count = len(layer_ids)

    def y(value: float) -> float:
        return round((HEIGHT - FOOT) * (ceiling - value) / (ceiling - 1.0) + 1, 1)

    marks = [
        {
            "layer": layer_ids[index],
            "x": 8.0 + 90.0 * (index + 0.5) / count,
            "sides": [("before", *before[index], *map(y, before[index])), ("after", *after[index], *map(y, after[index]))],
            # All of few layers have their number below, of many about eight.
            "is_named": index % -(-count // 8) == 0,
        }
        for index in range(count)
    ]
    return {"height": HEIGHT, "ticks": [(tick, y(tick)) for tick in _ticks(1.0, top)], "marks": marks}


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from *low* up."""
    rough = (high - low) / 4
    size = 10 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [round(low + step * k, 10) for k in range(int((high - low) / step + 1e-9) + 1)]
