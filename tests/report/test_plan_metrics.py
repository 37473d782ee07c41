import numpy as np
import pytest

from routepack.report.plan_metrics import load_violations, rank_imbalance


def test_violations_are_those_worked_out_by_hand():
    # Layer 3: shares 3/8, 4/8, 1/8, 0 of four experts, times 4, minus 1: 0.5, 1, -0.5, -1. Layer 9: even.
    figures = load_violations(np.array([[3, 4, 1, 0], [2, 2, 2, 2]]), np.array([3, 9]))
    assert figures == {
        "moe/max_vio": 1.0,
        "moe/min_vio": -1.0,
        "moe/avg_vio": (0.75 + 0.0) / 2,
        "moe/layer_3/max_vio": 1.0,
        "moe/layer_9/max_vio": 0.0,
        "moe/layer_3/min_vio": -1.0,
        "moe/layer_9/min_vio": 0.0,
        "moe/layer_3/avg_vio": 0.75,
        "moe/layer_9/avg_vio": 0.0,
    }


def test_a_layer_without_rows_is_no_layer_of_the_violations():
    figures = load_violations(np.array([[0, 0], [1, 3]]), np.array([0, 1]))
    assert figures["moe/min_vio"] == -0.5
    assert "moe/layer_0/max_vio" not in figures


def test_vllm_39178_imbalance_is_counted_layer_by_layer_and_rank_by_rank():
    # What vllm#39178 got wrong: averages over ranks or layers before the ratio. Here each alone would seem even.
    rows_MGRL = np.array([[[[9, 1], [1, 9]]]])
    figures = rank_imbalance(rows_MGRL)
    assert figures["moe/imbalance_mean"] == pytest.approx(1.8)
    assert figures["moe/imbalance_max"] == pytest.approx(1.8)


def test_imbalance_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    rows_MGRL = rng.integers(0, 50, (3, 2, 4, 5))
    rows_MGRL[1, 0, :, 2] = 0
    over = []
    for m in range(3):
        for g in range(2):
            for layer in range(5):
                ranks = [int(rows_MGRL[m, g, r, layer]) for r in range(4)]
                if sum(ranks):
                    over.append(max(ranks) / (sum(ranks) / 4))
    figures = rank_imbalance(rows_MGRL, prefix="")
    assert figures["imbalance_mean"] == pytest.approx(np.mean(over))
    assert figures["imbalance_p95"] == pytest.approx(np.percentile(over, 95))
    assert figures["imbalance_max"] == pytest.approx(max(over))


def test_nothing_routed_has_no_figures():
    assert load_violations(np.zeros((2, 4)), np.arange(2)) == {}
    assert rank_imbalance(np.zeros((1, 1, 2, 3))) == {}
