"""A plan's figures as plain floats, for any logger."""

from __future__ import annotations

from routepack.types import Plan


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
