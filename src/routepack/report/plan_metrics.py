"""A plan's figures, and the loads that a step really had, as plain floats for any logger. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import numpy as np

from routepack.core.plans import Plan


def plan_metrics(plan: Plan, prefix: str = "plan/") -> dict[str, float]:
    """What a plan predicts, beside its baseline and its bound.

    ``value``, ``bound`` and ``baseline_value`` are in ``plan.unit``; ``gap`` and ``gain`` are fractions
    (``gain`` 0.25: the baseline takes 25 % longer than the plan); ``plan_ms`` is the time that planning took,
    and ``kernel_ms`` what of it a first plan under a time limit waited for kernels.
    """
    figures = {
        "value": plan.value,
        "bound": plan.bound,
        "baseline_value": plan.baseline_value,
        "gap": plan.gap,
        "gain": plan.baseline_value / plan.value - 1.0,
        "num_microbatches": plan.num_microbatches,
        "num_microbatches_bound": plan.certificate.lower_bound,
        "baseline_num_microbatches": plan.baseline_microbatches,
        "plan_ms": 1e3 * plan.plan_seconds,
        "kernel_ms": 1e3 * plan.kernel_seconds,
        **plan.parts,
    }
    return {f"{prefix}{name}": float(value) for name, value in figures.items()}


def load_violations(tokens_LE: np.ndarray, layer_ids_L: np.ndarray, prefix: str = "moe/") -> dict[str, float]:
    """How far experts are from equal loads, layer by layer: ``max_vio``, ``min_vio`` and ``avg_vio`` as verl logs them.

    With p the share of a layer's routed rows that an expert gets, its violation is E * p - 1: 0 for its even share, -1 where
    it is never chosen. ``avg_vio`` averages absolute values; the plain mean is 0. Layers without rows are left out. The
    names without a layer are the largest, the smallest and the mean of all layers.

    Args:
        tokens_LE: int [L, E]: rows of MoE layers that were really routed, without padding.
        layer_ids_L: the layers' names, int [L].

    >>> load_violations(np.array([[3, 1, 0, 0]]), np.array([7]))["moe/layer_7/max_vio"]
    2.0
    """
    tokens_LE = np.asarray(tokens_LE, dtype=np.float64)
    routed_L = np.flatnonzero(tokens_LE.sum(axis=1) > 0)
    if not len(routed_L):
        return {}
    vio_LE = tokens_LE[routed_L] / tokens_LE[routed_L].mean(axis=1, keepdims=True) - 1.0
    of_layers = {"max_vio": vio_LE.max(axis=1), "min_vio": vio_LE.min(axis=1), "avg_vio": np.abs(vio_LE).mean(axis=1)}
    whole = {"max_vio": np.max, "min_vio": np.min, "avg_vio": np.mean}
    figures = {f"{prefix}{name}": float(whole[name](values_L)) for name, values_L in of_layers.items()}
    for name, values_L in of_layers.items():
        for layer, value in zip(np.asarray(layer_ids_L)[routed_L], values_L, strict=True):
            figures[f"{prefix}layer_{layer}/{name}"] = float(value)
    return figures


def rank_imbalance(rows_MGRL: np.ndarray, prefix: str = "moe/") -> dict[str, float]:
    """``imbalance_mean``, ``_p95`` and ``_max`` of the fullest EP rank's rows over the mean, of each unit and layer.

    What a layer of a microbatch waits for. Layers of a unit without rows are left out.

    Args:
        rows_MGRL: int [M, G, R, L]: routed rows that each EP rank computes.

    >>> rank_imbalance(np.array([[[[3], [1]]], [[[2], [2]]]]))
    {'moe/imbalance_mean': 1.25, 'moe/imbalance_p95': 1.475, 'moe/imbalance_max': 1.5}
    """
    mean_MGL = np.asarray(rows_MGRL).mean(axis=2)
    routed = mean_MGL > 0
    if not routed.any():
        return {}
    over = np.asarray(rows_MGRL).max(axis=2)[routed] / mean_MGL[routed]
    values = {"mean": over.mean(), "p95": np.percentile(over, 95), "max": over.max()}
    return {f"{prefix}imbalance_{name}": float(value) for name, value in values.items()}
