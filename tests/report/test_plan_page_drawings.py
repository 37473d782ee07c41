import numpy as np
import pytest
from markupsafe import Markup

from routepack.report import plan_page_drawings as drawings
from routepack.report.plan_page import clean, template_environment


@pytest.fixture(scope="module")
def draw():
    return template_environment().get_template("plan_page_drawings.html.j2").module


def test_attributes_and_text_are_escaped(draw):
    drawn = draw.bar([("a", "<script>&", 1.0)], 1.0, '"><img>')
    assert 'aria-label="&#34;&gt;&lt;img&gt;"><title>&#34;&gt;&lt;img&gt;</title>' in drawn
    assert '<rect class="a"' in drawn
    assert "<title>&lt;script&gt;&amp;</title></rect>" in drawn


def test_markup_children_are_kept(draw):
    assert "<title><b></b></title></rect>" in draw.bar([("a", Markup("<b></b>"), 1.0)], 1.0, "x")


def test_what_cannot_be_shown_is_replaced_in_a_drawing(draw):
    drawn = draw.bar([("a", "a\x00b", 1.0)], 1.0, "c\u202ed" + 1000 * "x")
    assert "a\ufffdb" in drawn
    assert f'aria-label="c\ufffdd{297 * "x"}…"' in drawn


@pytest.mark.parametrize("text", ["a\x00b", "a\u202eb", "a\ud800b", "a\x1bb", "a\u2028b"])
def test_what_cannot_be_shown_is_replaced(text):
    assert clean(text) == "a\ufffdb"


def test_endless_text_is_cut():
    assert clean("x" * 1000) == "x" * 300 + "…"


def test_a_bar_s_parts_fill_their_shares(draw):
    drawn = draw.bar([("one", "one: 1", 1.0), ("none", "none: 0", 0.0), ("two", "two: 3", 3.0)], 8.0, "bar")
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
def test_every_cell_is_drawn_once_in_its_step(draw, shape):
    import re

    busy_DM = np.random.default_rng(0).random(shape)
    edges = drawings.steps(0.0, 1.0)
    drawn = draw.heat_map(drawings.heat_map(busy_DM, edges), "map")
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
    cells = drawings.shown_cells(busy_DM)
    assert cells.shape[0] <= drawings.MOST_RANKS
    assert cells.shape[1] <= drawings.MOST_MICROBATCHES
    assert (cells.max(), (cells > 0).sum()) == (5.0, 1)


def test_equal_cells_are_drawn_too(draw):
    assert "<path" in draw.heat_map(drawings.heat_map(np.ones((2, 2)), drawings.steps(1.0, 1.0)), "even")


def test_an_even_layer_chart_has_an_axis(draw):
    assert "<circle" in draw.layer_chart(drawings.layer_chart([0], [(1.0, 1.0)], [(1.0, 1.0)]), "even")
