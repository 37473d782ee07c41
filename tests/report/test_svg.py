import numpy as np
import pytest
from markupsafe import Markup

from routepack.report import svg


def test_attributes_and_text_are_escaped():
    drawn = svg.tag("text", "<script>&", title='"><img>', class_="a")
    assert drawn == '<text title="&#34;&gt;&lt;img&gt;" class="a">&lt;script&gt;&amp;</text>'


def test_markup_children_are_kept():
    assert svg.tag("g", Markup("<b></b>"), "x") == "<g><b></b>x</g>"


@pytest.mark.parametrize("text", ["a\x00b", "a\u202eb", "a\ud800b", "a\x1bb", "a\u2028b"])
def test_what_cannot_be_shown_is_replaced(text):
    assert svg.clean(text) == "a\ufffdb"


def test_endless_text_is_cut():
    assert svg.clean("x" * 1000) == "x" * 300 + "…"


def test_a_bar_s_parts_fill_their_shares():
    drawn = svg.bar([("one", "one: 1", 1.0), ("none", "none: 0", 0.0), ("two", "two: 3", 3.0)], 8.0, "bar")
    assert 'x="0.000%" y="0" width="12.500%"' in drawn
    assert 'x="12.500%" y="0" width="37.500%"' in drawn
    assert "none" not in drawn


def drawn_cells(path):
    """The cells that a path of merged rectangles covers."""
    import re

    cells = set()
    for column, row, one, two in re.findall(r"M(\d+) (\d+)([hv]\d+)([hv]\d+)[hv]-\d+z", path):
        size = {part[0]: int(part[1:]) for part in (one, two)}
        cells |= {(int(row) + i, int(column) + j) for i in range(size["v"]) for j in range(size["h"])}
    return cells


@pytest.mark.parametrize("shape", [(3, 9), (9, 3), (1, 1), (120, 40)])
def test_every_cell_is_drawn_once_in_its_step(shape):
    import re

    busy_DM = np.random.default_rng(0).random(shape)
    edges = svg.steps(0.0, 1.0)
    drawn = svg.heat_map(busy_DM, edges, "map")
    seen = []
    for name, path in re.findall(r'<path class="h(\d)" d="([^"]*)"', drawn):
        cells = drawn_cells(path)
        for row, column in cells:
            assert edges[int(name)] <= busy_DM[row, column] < edges[int(name) + 1]
        seen += cells
    assert len(seen) == len(set(seen)) == busy_DM.size


def test_of_too_many_ranks_the_busiest_shows():
    busy_DM = np.zeros((512, 100))
    busy_DM[300, 77] = 5.0
    cells = svg.shown_cells(busy_DM)
    assert cells.shape[0] <= svg.MOST_RANKS
    assert cells.shape[1] <= svg.MOST_MICROBATCHES
    assert (cells.max(), (cells > 0).sum()) == (5.0, 1)


def test_equal_cells_are_drawn_too():
    assert "<path" in svg.heat_map(np.ones((2, 2)), svg.steps(1.0, 1.0), "even")


def test_an_even_layer_chart_has_an_axis():
    assert "<circle" in svg.layer_chart([0], [(1.0, 1.0)], [(1.0, 1.0)], "even")
