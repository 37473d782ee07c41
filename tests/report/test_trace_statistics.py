import io
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from routepack import testing
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError
from routepack.core.rollouts import RolloutBatch
from routepack.report.console_tables import inspection_text
from routepack.report.trace_statistics import inspect_routing, layer_loads


def batch_of(ids, lengths, rows=None, **more):
    rows = np.asarray(lengths) - 1 if rows is None else rows
    return RolloutBatch(
        routed_experts_TLK=np.asarray(ids, np.uint8),
        cu_seqlens=np.concatenate([[0], np.cumsum(rows)]),
        num_tokens_S=lengths,
        num_experts=more.pop("num_experts", 4),
        **more,
    )


@pytest.fixture(scope="module")
def recorded(shared_data):
    """The recorded trace, read past routepack: ids, offsets, domains."""
    tensors = load_file(shared_data / "dsv2lite/routing.safetensors")
    return tensors["routed_experts"], tensors["cu_seqlens"], tensors["group_ids"], tensors["layer_ids"]


@pytest.fixture(scope="module")
def inspected(shared_data):
    from routepack.traces.trace_files import load_trace

    return inspect_routing(load_trace(shared_data / "dsv2lite/routing.safetensors"))


def test_hottest_experts_agree_with_a_direct_recount(recorded, inspected):
    ids_TLK, _, _, layer_ids = recorded
    for layer, name in enumerate(layer_ids):
        counted = np.bincount(ids_TLK[:, layer].ravel(), minlength=64)
        loads = inspected.layers
        assert loads.layer_ids_L[layer] == name
        assert (loads.hottest_L[layer], loads.hottest_rows_L[layer]) == (counted.argmax(), counted.max())
        assert loads.hottest_over_mean_L[layer] == pytest.approx(counted.max() / (ids_TLK.shape[0] * 6 / 64))
        assert loads.variation_L[layer] == pytest.approx(np.std(counted) / np.mean(counted))


def test_domain_figures_agree_with_a_direct_recount(recorded, inspected):
    ids_TLK, cu_seqlens, domain_S, layer_ids = recorded
    domain_T = np.repeat(domain_S, np.diff(cu_seqlens))
    share = {
        domain: np.stack([np.bincount(ids_TLK[domain_T == domain, layer].ravel(), minlength=64) for layer in range(26)])
        / (6 * (domain_T == domain).sum())
        for domain in (0, 1, 2)
    }
    groups = inspected.groups
    assert sorted(groups.group_g.tolist()) == [0, 1, 2]
    for one, name in enumerate(groups.group_g.tolist()):
        assert groups.sequences_g[one] == (domain_S == name).sum()
        assert groups.rows_g[one] == (domain_T == name).sum()
        layer, expert = np.unravel_index(share[name].argmax(), (26, 64))
        assert groups.hottest_g[one] == (layer_ids[layer], expert, pytest.approx(share[name].max()))
        for two, other in enumerate(groups.group_g.tolist()):
            apart = [0.5 * sum(abs(share[name][layer] - share[other][layer])) for layer in range(26)]
            assert groups.distance_gg[one, two] == pytest.approx(sum(apart) / 26)


def test_domains_lie_further_apart_than_halves_of_one_domain(inspected):
    assert inspected.groups.between > 5 * inspected.groups.within


def test_prompt_correlation_agrees_with_numpy_s(recorded, inspected):
    ids_TLK, cu_seqlens, _, _ = recorded
    found = []
    for start, end in pairwise(cu_seqlens):
        cut = start + -(-(end - start) // 2)
        parts = [(start, cut), (cut, end)]
        layers = [[np.bincount(ids_TLK[a:b, layer].ravel(), minlength=64) for a, b in parts] for layer in range(26)]
        found.append(np.mean([np.corrcoef(*pair)[0, 1] for pair in layers]))
    assert inspected.prompt_response.correlation_S == pytest.approx(found)


def test_a_request_resembles_itself_more_than_another(inspected):
    found = inspected.prompt_response
    assert found.correlation_S.mean() > found.other_S.mean() + 0.1


def test_masked_rows_count_nowhere():
    rows = [[[0, 1]], [[2, 3]], [[0, 0]]]
    found = inspect_routing(batch_of(rows, [4], valid_T=np.array([True, True, False])))
    assert found.layers.hottest_rows_L.tolist() == [1]
    assert (found.coverage.recorded_rows, found.coverage.masked_rows, found.coverage.partial_sequences) == (2, 1, 1)


def test_estimated_sequences_count_nowhere():
    rows = [[[0, 1]], [[0, 2]]]
    batch = batch_of(rows, [3, 9], rows=[2, 0])
    demand = RoutingDemandCollector().collect(batch)
    assert demand.estimated_S.tolist() == [False, True]
    for window in (batch, demand):
        found = inspect_routing(window)
        assert found.layers.hottest_rows_L.tolist() == [2]
        assert found.coverage.missing_sequences == 1
        assert found.coverage.share == 0.2


def test_loss_mask_tells_prompts_from_responses():
    # Prompt rows name experts 0 and 1, response rows 2 and 3: nothing in common.
    rows, mask = [[[0, 1]]] * 3 + [[[2, 3]]] * 2, np.array([0, 0, 0, 1, 1, 1])
    found = inspect_routing(batch_of(rows, [6], token_fields={"loss_mask": mask}))
    assert found.prompt_response.boundary == "loss_mask"
    assert found.prompt_response.correlation_S.tolist() == [pytest.approx(-1.0)]


def test_a_share_cuts_sequences_whatever_their_mask_says():
    rows, mask = [[[0, 1]]] * 2 + [[[2, 3]]] * 4, np.array([0, 0, 1, 1, 1, 1, 1])
    found = inspect_routing(batch_of(rows, [7], token_fields={"loss_mask": mask}), prompt_share=0.0)
    assert found.prompt_response is None
    found = inspect_routing(batch_of(rows, [7], token_fields={"loss_mask": mask}), prompt_share=0.5)
    assert found.prompt_response.boundary == "cut at 50% of each sequence"
    # Four prompt rows name every expert twice: an even layer tells nothing.
    assert found.prompt_response.correlation_S.tolist() == [0.0]


def test_masked_rows_say_nothing_of_prompts_and_responses():
    rows, mask = [[[0, 1]]] * 2 + [[[2, 3]]] * 2 + [[[0, 1]]] * 2, np.array([0, 0, 1, 1, 1, 1, 1])
    batch = batch_of(rows, [7], token_fields={"loss_mask": mask}, valid_T=np.array([True] * 4 + [False] * 2))
    assert inspect_routing(batch).prompt_response.correlation_S.tolist() == [pytest.approx(-1.0)]


def test_num_prompt_tokens_tells_prompts_from_responses():
    rows = [[[0, 1]]] * 3 + [[[2, 3]]] * 2
    found = inspect_routing(batch_of(rows, [6], sequence_fields={"num_prompt_tokens": np.array([3])}))
    assert found.prompt_response.correlation_S.tolist() == [pytest.approx(-1.0)]


def test_another_field_can_group_sequences():
    rows = [[[0, 1]], [[2, 3]]]
    batch = batch_of(rows, [2, 2], group_S=np.array([7, 7]), sequence_fields={"domain": np.array([1, 2])})
    assert inspect_routing(batch).groups.group_g.tolist() == [7]
    found = inspect_routing(batch, by="domain").groups
    assert found.distance_gg.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(ConfigError, match="choose group, domain"):
        inspect_routing(batch, by="task")


def test_an_even_layer_has_no_hot_expert():
    loads = layer_loads(np.full((1, 10), 5), np.array([0]))
    assert (loads.hottest_over_mean_L[0], loads.variation_L[0], loads.hot_share_L[0]) == (1.0, 0.0, 0.1)


def test_figures_are_valid_json_even_where_nothing_is_known():
    batch = testing.synthetic_batch(num_sequences=4, group_size=1, max_length=32)
    figures = json.loads(json.dumps(inspect_routing(batch).as_dict(), allow_nan=False))
    assert figures["groups"]["within"] is None


@pytest.mark.parametrize("groups", [2, 3, 4, 9])
def test_no_word_of_a_table_is_cut_at_80_characters(groups):
    lengths = [200] * (2 * groups)
    rows = np.argsort(np.random.default_rng(0).random((199 * 2 * groups, 26, 64)), axis=2)[..., :6]
    batch = batch_of(rows, lengths, num_experts=64, group_S=np.arange(2 * groups) % groups + 100)
    console = Console(width=80, file=io.StringIO())
    console.print(inspection_text(inspect_routing(batch)))
    text = console.file.getvalue()
    assert "…" not in text
    assert re.search(r"group +sequences .* elsewhere *$", text, re.MULTILINE)
    assert len(re.findall(r"^ *10\d +2 .*%$", text, re.MULTILINE)) == min(groups, 6)
