import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from routepack import testing
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, PlanError
from routepack.core.plans import ExpertPlacement, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostModel
from routepack.planning.planner import Planner
from routepack.report import plan_page_drawings as drawings
from routepack.report import plan_page_figures as figures
from routepack.report.plan_page import render_report, template_environment, write_report

TAGS = """html head meta link title style body header h1 h2 h3 p strong b ul li span div figure figcaption table thead tbody
    tr th td dl dt dd details summary pre code svg defs pattern rect path circle line text g"""
HARMLESS = set(TAGS.split())


class Reader(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_harmless(page):
    read = Reader(page)
    assert set(read.tags) <= HARMLESS
    for tag, name, value in read.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "action", "xlink:href", "background"), (tag, name)
        if name == "href":
            assert (tag, value) == ("link", "data:,")
        if name == "style":
            assert "evil" not in value
    return read


def test_a_page_shows_baseline_plan_and_bound(plan, window):
    text = " ".join(Reader(render_report(plan, window)).text)
    for figure in (plan.baseline_value, plan.value, plan.bound):
        assert f"{figure:.3f}" in text
    assert f"{100 * (1 - plan.value / plan.baseline_value):.1f} % less time" in text


def test_a_page_names_digests_versions_and_config(plan, window):
    text = "".join(Reader(render_report(plan, window)).text)
    for said in (plan.demand_digest, plan.digest, '"data_parallel_degree": 4', '"numba"', '"num_proposals": 2000'):
        assert said in text


def test_a_page_needs_nothing_else(plan, window):
    page = render_report(plan, window)
    check_harmless(page)
    assert "url(http" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_the_same_plan_gives_the_same_page(plan, window):
    assert render_report(plan, window) == render_report(plan, window)


def test_without_a_trace_a_page_says_what_it_cannot_show(plan):
    text = " ".join(Reader(render_report(plan)).text)
    assert "No trace was given" in text
    assert "layer by layer" not in text


def test_hostile_words_stay_words(hostile, evil):
    changed, recorded = hostile
    for given in (recorded, None):
        page = render_report(changed, given, plan_name=evil, trace_name=evil)
        read = check_harmless(page)
        assert "alert(1)" in "".join(read.text)
        assert len(page.encode()) < 400_000


def test_the_check_for_hostile_words_can_fail(evil):
    with pytest.raises(AssertionError):
        check_harmless(f"<p>{evil}</p>")


def test_a_changed_plan_gets_no_page(plan, window):
    changed = replace(plan, value=0.9 * plan.value)
    for given in (window, None):
        with pytest.raises(PlanError, match="changed after it was made"):
            render_report(changed, given)


def test_another_trace_gets_no_page(plan):
    other = testing.synthetic_batch(num_sequences=48, max_length=256, num_layers=5, seed=1)
    with pytest.raises(PlanError, match="another window"):
        render_report(plan, other)


def test_a_plan_that_lies_in_its_own_favour_gets_no_page(plan, window, resealed):
    with pytest.raises(PlanError, match="is worth"):
        render_report(resealed(plan, value=0.9 * plan.value), window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": {}}, "keeps no figure"),
        ({"cost": {}}, "keeps no rate"),
        ({"bound": 0.0}, "above 0"),
        ({"max_tokens": 9}, "cap"),
    ],
)
def test_a_plan_without_what_a_page_needs_says_so(plan, changes, message, resealed):
    with pytest.raises(PlanError, match=message):
        render_report(resealed(plan, **changes))


def test_a_page_is_written_whole_or_not_at_all(plan, window, tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(plan, tmp_path / "missing/report.html", window)
    out = tmp_path / "report.html"
    out.write_text("old")
    with pytest.raises(PlanError):
        write_report(replace(plan, value=1.0), out, window)
    assert (out.read_text(), list(tmp_path.iterdir())) == ("old", [out])


def test_estimated_and_masked_rows_are_told(window, plan_of):
    rows = np.arange(len(window.routed_experts_TLK))
    recorded = replace(window, valid_T=rows >= window.cu_seqlens[3])
    text = " ".join(Reader(render_report(plan_of(recorded), recorded)).text)
    assert "3 of 48 sequences had too few recorded routes" in text
    assert f"{window.cu_seqlens[3]:,} rows" in text


def test_seconds_get_a_unit():
    demand = testing.synthetic_demand(num_sequences=32, num_layers=4, num_experts=16, max_length=128)
    plan = Planner(
        topology=Topology(data_parallel_degree=4, expert_parallel_degree=2),
        packer=AttentionAwarePacker(max_tokens=512),
        cost_model=CostModel.for_model("qwen3_30b_a3b", device="h200"),
        num_proposals=500,
    ).plan(demand)
    page = render_report(plan, demand)
    assert "\u202fms" in page or "\u202fµs" in page
    assert "\ufffd" not in page
    assert "an even step" not in page


@pytest.mark.parametrize("sync", ["step", "microbatch", "layer"])
def test_every_sync_has_a_page(sync, plan_of):
    demand = testing.synthetic_demand(num_sequences=32, max_length=64)
    for expert in (1, 4):
        Reader(render_report(plan_of(demand, expert=expert, sync=sync), demand))


def test_links_are_a_part_of_the_step(linked, plan, window):
    assert "links" not in render_report(plan, window).split("<details>")[0].split("</style>")[1]
    page = render_report(linked, window)
    assert "links between ranks" in page
    assert "counts no links" in page


def test_a_large_plan_s_page_stays_small():
    from routepack.components.baselines import LPTRerouter, TokenLPTPacker

    rng = np.random.default_rng(0)
    length_S = rng.integers(100, 700, 2048)
    demand = RoutingDemand(
        tokens_SLE=np.stack([rng.multinomial(2 * length, np.full(16, 1 / 16), 94) for length in length_S]),
        length_S=length_S,
        top_k=2,
    )
    topology = Topology(data_parallel_degree=512, expert_parallel_degree=8)
    plan = Planner(topology=topology, packer=TokenLPTPacker(max_tokens=700), rerouter=LPTRerouter()).plan(demand)
    page = render_report(plan, demand)
    assert len(page.encode()) < 400_000
    # Nor does noise, which merges into no runs, make it larger.
    draw = template_environment().get_template("plan_page_drawings.html.j2").module
    noise = draw.heat_map(drawings.heat_map(rng.random((2048, 300)), drawings.steps(0.0, 1.0)), "noise")
    assert 2 * len(noise) + 100_000 < 400_000


def test_json_in_a_page_is_whole(plan, window):
    page = render_report(plan, window)
    read = Reader(page)
    texts = [text for text in read.text if text.lstrip().startswith("{\n")]
    assert len(texts) == 3
    assert json.loads(texts[1]) == dict(plan.versions)


def test_a_demand_serves_as_well_as_its_trace(plan, window):
    demand = RoutingDemandCollector().collect(window)
    assert Reader(render_report(plan, demand)).tags == Reader(render_report(plan, window)).tags


def test_a_page_shows_loads_before_and_after(plan, window):
    demand = RoutingDemandCollector().collect(window)
    first = ExpertPlacement.identity(plan.placement.num_layers, plan.placement.num_experts)
    before = figures.side_of(plan, figures.baseline_packing(plan), first, demand)
    after = figures.side_of(plan, plan.packing, plan.placement, demand)
    text = "".join(Reader(render_report(plan, window)).text)
    assert (
        f"Mean over layers: {np.mean(before.peak_over_mean_L):.3f} before, {np.mean(after.peak_over_mean_L):.3f} after" in text
    )
    even = after.busy_DM.mean()
    for side in (before, after):
        assert f"{side.busy_DM.min() / even:.2f} to {side.busy_DM.max() / even:.2f}" in text


def test_of_mixed_modalities_the_baseline_shows_with_the_trace_alone(plan_of):
    window = testing.synthetic_batch(num_sequences=48, max_length=256, num_modalities=2)
    plan = plan_of(window)
    assert "<h3>Baseline</h3>" in render_report(plan, window)
    page = render_report(plan)
    assert "<h3>Baseline</h3>" not in page
    assert "cannot be told from the plan alone" in page
