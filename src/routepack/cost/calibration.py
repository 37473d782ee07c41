"""A cost model from measured steps: rates fitted to logged loads and seconds, for each ``sync``; and which ``sync`` holds.

Letters: :mod:`routepack.core`; n steps. A step is taken to last

    step_seconds + M * microbatch_seconds + tokens / W * shared_token_seconds
        + (attention and expert terms, joined as ``sync`` says)

where a cell's attention term is ``token_seconds * tokens + pair_seconds * pairs`` and a unit's expert term is
``expert_seconds * rows`` of its fullest EP rank. Whoever waits for whom follows from the rates, so the fit alternates: find
the slowest cells under the rates, fit the rates to them, until neither changes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from routepack.core.component import NotNegative
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import SYNCS, Sync, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.models import CostModel, CostRates
from routepack.cost.step_log import StackedLoads, StepLoads, StepRecord

logger = logging.getLogger(__name__)

TERMS = ("token_seconds", "pair_seconds", "expert_seconds", "microbatch_seconds", "step_seconds", "shared_token_seconds")
"""What is fitted, in this order."""
SHARED = TERMS.index("shared_token_seconds")
ROUNDS = 30
"""Alternations after which a fit ends even if the slowest cells still change."""
OUTLIER = 3.0
"""Steps further off than so many robust standard deviations count less (Huber's weights)."""
SINGULAR = 1e-6
"""Directions in which normalised loads vary less than this, relative to the largest, cannot be told apart."""
UNCERTAIN = 0.25
"""A term whose standard error is more than this share of a step is not known."""
SHARED_UNCERTAIN = 0.1
"""As UNCERTAIN, of what ranks share: steps that tell it less well are fitted without it."""
FOLDS = 5
TIE = 0.002
"""Errors that differ by less than this share of a step are equal."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCost(CostModel):
    """Seconds, from rates that ``routepack calibrate`` fitted to logged steps.

    A plan's value is the part of a step that planning can change; :meth:`predicted_seconds` adds the overheads.
    """

    unit: ClassVar[str] = "seconds"

    expert_seconds: NotNegative
    """Per routed row of the fullest EP rank, in one layer."""
    token_seconds: NotNegative
    """Per token of a cell, all layers together."""
    pair_seconds: NotNegative
    """Per token pair (length squared) of a cell, all layers together."""
    microbatch_seconds: NotNegative = 0.0
    """Per microbatch, whatever is in it."""
    step_seconds: NotNegative = 0.0
    """Per step: the optimizer, and all else that does not depend on what is trained."""
    shared_token_seconds: NotNegative = 0.0
    """Per token of the mean rank, whichever rank has it: what ranks share, such as links, memory bandwidth or cores. A rank
    that waits leaves its part to the others, so stragglers cost less than their own work says."""

    def check_options(self) -> None:
        """Raise ConfigError where nothing has a price."""
        if not max(self.expert_seconds, self.token_seconds, self.pair_seconds) > 0:
            raise ConfigError("cost_model needs expert_seconds, token_seconds or pair_seconds above 0.")

    def rates(self, demand: RoutingDemand, topology: Topology) -> CostRates:
        """The fitted rates, whatever the window. They hold for the topology whose steps were fitted."""
        return CostRates(
            expert=self.expert_seconds,
            linear_I=np.array([self.token_seconds]),
            quadratic_I=np.array([self.pair_seconds]),
            unit=self.unit,
        )

    def predicted_seconds(self, loads: StepLoads, sync: Sync) -> float:
        """Seconds of a whole step with these loads."""
        theta = np.array([getattr(self, name) for name in TERMS])
        return float((_features(StackedLoads.of([loads]), sync, theta) @ theta)[0])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Rates fitted to steps under one ``sync``, and how well they predict steps that they were not fitted to."""

    sync: Sync
    cost_model: MeasuredCost
    num_steps: int
    error: float
    """Median of \\|predicted - measured\\| / measured, each step predicted from the folds that it is not in."""
    error_p90: float
    uncertainty: dict[str, float]
    """Standard error of each term, as a share of the mean step."""
    shares: dict[str, float]
    """Share of the mean step of each term."""


def fit(records: Sequence[StepRecord], sync: Sync, *, uncertain: float = UNCERTAIN) -> Fit:
    """Fit :class:`MeasuredCost` to logged steps; no term may be known worse than to *uncertain*, a share of a step.

    Raises TraceError where there are too few steps, or where their loads do not tell the terms apart.
    """
    loads, seconds_n = _stacked(records)
    theta, uncertainty, terms = _fitted(loads, seconds_n, sync, uncertain)
    errors_n = _held_out_errors(records, sync, terms)
    shares = _features(loads, sync, theta).mean(axis=0) * theta / seconds_n.mean()
    return Fit(
        sync=sync,
        cost_model=_model(theta),
        num_steps=len(records),
        error=float(np.median(errors_n)),
        error_p90=float(np.percentile(errors_n, 90)),
        uncertainty=dict(zip(TERMS, uncertainty.tolist(), strict=True)),
        shares=dict(zip(TERMS, shares.tolist(), strict=True)),
    )


def rates_of(records: Sequence[StepRecord], sync: Sync) -> MeasuredCost:
    """The cost model of :func:`fit`, without judging it."""
    return _model(_fitted(*_stacked(records), sync, UNCERTAIN)[0])


def calibrate(records: Sequence[StepRecord], *, uncertain: float = UNCERTAIN) -> dict[Sync, Fit]:
    """A fit for every ``sync``. Raises as :func:`fit`."""
    return {sync: fit(records, sync, uncertain=uncertain) for sync in SYNCS}


def best_sync(error_of_sync: dict[Sync, float], *, configured: Sync = "step") -> Sync:
    """The ``sync`` that predicts best: the smallest error; *configured* where that is within :data:`TIE` of the smallest.

    With one EP group, all three are the same, and so are their errors.

    >>> best_sync({"step": 0.08, "microbatch": 0.05, "layer": 0.021})
    'layer'
    >>> best_sync({"step": 0.021, "microbatch": 0.05, "layer": 0.02})
    'step'
    """
    smallest = min(error_of_sync, key=lambda sync: (error_of_sync[sync], SYNCS.index(sync)))
    return configured if error_of_sync[configured] <= error_of_sync[smallest] + TIE else smallest


@dataclass(kw_only=True, eq=False)
class Forecaster:
    """Predicts every step before it is measured, from the steps before it, under every ``sync``."""

    configured: Sync = "step"
    """What the plans are made for; kept where nothing predicts better."""
    memory: int = 128
    """The latest so many steps are fitted and judged by."""
    refit_every: int = 8
    """Steps between fits."""
    records: deque[StepRecord] = field(init=False)
    best: Sync = field(init=False)
    """The ``sync`` that predicted best so far."""

    def __post_init__(self) -> None:
        self.records, self.best = deque(maxlen=self.memory), self.configured
        self._models: dict[Sync, MeasuredCost] = {}
        self._since_fit = 0

    def predict(self, loads: StepLoads) -> dict[Sync, float]:
        """Seconds of a step under every ``sync``; empty while the steps so far do not tell the rates."""
        return {sync: model.predicted_seconds(loads, sync) for sync, model in self._models.items()}

    def observe(self, record: StepRecord) -> None:
        """A step was measured; ``record.predicted_seconds`` holds what :meth:`predict` said of it."""
        self.records.append(record)
        self._since_fit += 1
        if not self._models or self._since_fit >= self.refit_every:
            self._refit()
        errors = self.errors()
        best = best_sync(errors, configured=self.configured) if errors else self.best
        if best != self.best:
            logger.info(
                "sync=%s predicts steps best (median errors %s); plans are made for sync=%s",
                best, ", ".join(f"{sync} {error:.1%}" for sync, error in errors.items()), self.configured,
            )  # fmt: skip
        self.best = best

    def errors(self) -> dict[Sync, float]:
        """Median of \\|predicted - measured\\| / measured over the steps that were predicted, under every ``sync``."""
        judged = [record for record in self.records if record.predicted_seconds]
        if not judged:
            return {}
        off = {sync: [abs(r.predicted_seconds[sync] / r.seconds - 1.0) for r in judged] for sync in SYNCS}
        return {sync: float(np.median(values)) for sync, values in off.items()}

    def _refit(self) -> None:
        self._since_fit = 0
        try:
            self._models = {sync: rates_of(list(self.records), sync) for sync in SYNCS}
        except TraceError as error:
            # Early on that is the rule; the rates known before stay in use.
            logger.debug("no fit after %d steps: %s", len(self.records), error)


def _stacked(records: Sequence[StepRecord]) -> tuple[StackedLoads, np.ndarray]:
    return StackedLoads.of([record.loads for record in records]), np.array([record.seconds for record in records])


def _model(theta: np.ndarray) -> MeasuredCost:
    if not theta[:3].max() > 0:
        raise TraceError("the steps take as long whatever is in them: log steps that differ more, on an idle machine.")
    return MeasuredCost(**dict(zip(TERMS, theta.tolist(), strict=True)))


def _fitted(
    loads: StackedLoads, seconds_n: np.ndarray, sync: Sync, uncertain: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rates, their uncertainty, which terms were fitted)."""
    terms = _checked_terms(loads, seconds_n, sync)
    try:
        shared = terms | (np.arange(len(TERMS)) == SHARED)
        theta, uncertainty = _solve(loads, seconds_n, sync, shared)
        _check_known(uncertainty, SHARED_UNCERTAIN)
        return theta, uncertainty, shared
    except TraceError:
        # Where all steps are balanced alike, what ranks share goes together with what each does.
        theta, uncertainty = _solve(loads, seconds_n, sync, terms)
    _check_known(uncertainty, uncertain)
    return theta, uncertainty, terms


def _features(loads: StackedLoads, sync: Sync, theta: np.ndarray) -> np.ndarray:
    """float64 [n, 6]: what multiplies each of TERMS in each step, the waiting being as the rates *theta* make it."""
    token, pair, row = theta[:3]
    tokens, pairs, rows = loads.tokens_nMGw, loads.pairs_nMGw, loads.rows_nMG
    mean_tokens_n = tokens.mean(axis=(2, 3)).sum(axis=1)
    if sync == "layer":
        n, most = tokens.shape[:2]
        tokens, pairs = tokens.reshape(n, most, 1, -1), pairs.reshape(n, most, 1, -1)
    slowest = np.argmax(token * tokens + pair * pairs, axis=-1)[..., None]
    tokens, pairs = (np.take_along_axis(value, slowest, axis=-1)[..., 0] for value in (tokens, pairs))
    if sync == "layer":
        chosen = [tokens.sum(axis=(1, 2)), pairs.sum(axis=(1, 2)), loads.joined_rows_n]
    else:
        unit_nMG = token * tokens + pair * pairs + row * rows
        if sync == "microbatch":
            group = np.argmax(unit_nMG, axis=-1)[..., None]
        else:
            group = np.broadcast_to(np.argmax(unit_nMG.sum(axis=1), axis=-1)[:, None, None], (*unit_nMG.shape[:2], 1))
        chosen = [np.take_along_axis(value, group, axis=-1).sum(axis=(1, 2)) for value in (tokens, pairs, rows)]
    return np.stack([*chosen, loads.microbatches_n, np.ones(len(loads.microbatches_n)), mean_tokens_n], axis=1)


def _start(loads: StackedLoads, seconds_n: np.ndarray) -> np.ndarray:
    """Rates under which tokens, pairs and rows cost a third of a step each."""
    totals = [loads.tokens_nMGw.max(axis=(2, 3)).sum(), loads.pairs_nMGw.max(axis=(2, 3)).sum(), loads.joined_rows_n.sum()]
    return np.array([seconds_n.sum() / 3 / total if total else 0.0 for total in totals] + [0.0, 0.0, 0.0])


def _checked_terms(loads: StackedLoads, seconds_n: np.ndarray, sync: Sync) -> np.ndarray:
    """bool [6]: the terms to fit. An overhead per microbatch needs steps with different numbers of them."""
    features = _features(loads, sync, _start(loads, seconds_n))
    terms = np.array([*(features[:, :3].max(axis=0) > 0), np.ptp(loads.microbatches_n) > 0, True, False])
    distinct = len(np.unique(features, axis=0))
    if distinct < terms.sum() + 1:
        raise TraceError(
            f"{len(seconds_n)} steps with {distinct} different loads cannot tell {int(terms.sum())} terms "
            f"({_names(terms)}): log more steps, with different windows or plans."
        )
    return terms


def _names(terms: np.ndarray) -> str:
    return ", ".join(name for name, known in zip(TERMS, terms, strict=True) if known)


def _solve(loads: StackedLoads, seconds_n: np.ndarray, sync: Sync, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rates, their standard errors as shares of the mean step)."""
    from scipy.optimize import nnls

    theta, weight_n, design = _start(loads, seconds_n), np.ones(len(seconds_n)), np.zeros(0)
    for _ in range(ROUNDS):
        features = _features(loads, sync, theta)
        # Relative errors: a step twice as long may be off by twice as much.
        design = features[:, terms] / seconds_n[:, None]
        scale = np.linalg.norm(design, axis=0)
        root = np.sqrt(weight_n)[:, None]
        solution, _ = nnls(root * design / scale, root[:, 0])
        found = np.zeros(len(TERMS))
        found[terms] = solution / scale
        weight_n = _weights(design @ found[terms] - 1.0)
        if np.allclose(found, theta, rtol=1e-9, atol=0.0):
            break
        theta = found
    return theta, _uncertainty(design, weight_n, theta, terms, seconds_n)


def _weights(residual_n: np.ndarray) -> np.ndarray:
    """Huber's weights: 1 for steps near the fit, less the further off a step is."""
    deviation = 1.4826 * float(np.median(np.abs(residual_n)))
    limit = OUTLIER * max(deviation, 1e-9)
    return limit / np.maximum(np.abs(residual_n), limit)


def _uncertainty(
    design: np.ndarray, weight_n: np.ndarray, theta: np.ndarray, terms: np.ndarray, seconds_n: np.ndarray
) -> np.ndarray:
    """float64 [6]: standard errors as shares of a step. Raises TraceError where loads go together."""
    scale = np.linalg.norm(design, axis=0)
    _, singular, directions = np.linalg.svd(design / scale, full_matrices=False)
    if singular[-1] < SINGULAR * singular[0]:
        together = np.abs(directions[-1]) > 0.1
        names = [name for name, used in zip(np.array(TERMS)[terms], together, strict=True) if used]
        raise TraceError(
            f"in these steps {' and '.join(names)} cannot be told apart, as their loads rise and fall together: log steps "
            "whose windows have other numbers of tokens and microbatches, or other placements."
        )
    residual_n = design @ theta[terms] - 1.0
    free = max(len(seconds_n) - int(terms.sum()), 1)
    variance = float((weight_n * residual_n**2).sum()) / free
    covariance = (directions.T / singular**2) @ directions * variance
    share = np.zeros(len(TERMS))
    share[terms] = np.sqrt(np.diag(covariance)) / scale * design.mean(axis=0)
    return share


def _check_known(uncertainty: np.ndarray, uncertain: float) -> None:
    worst = int(np.argmax(uncertainty))
    if uncertainty[worst] > uncertain:
        raise TraceError(
            f"{TERMS[worst]} is only known to within {uncertainty[worst]:.0%} of a step (at most {uncertain:.0%}): log more "
            "steps, or steps that differ more: other numbers of tokens and microbatches, other placements."
        )


def _held_out_errors(records: Sequence[StepRecord], sync: Sync, terms: np.ndarray) -> np.ndarray:
    """float64 [n]: each step's relative error, predicted by a fit to the folds without it."""
    loads, seconds_n = [record.loads for record in records], np.array([record.seconds for record in records])
    fold_n, errors_n = np.arange(len(records)) % FOLDS, np.zeros(len(records))
    for one in range(FOLDS):
        held = np.flatnonzero(fold_n == one)
        rest = np.flatnonzero(fold_n != one)
        if not len(held):
            continue
        known = StackedLoads.of([loads[n] for n in rest.tolist()])
        # Without the few steps of another size there may be nothing left to tell an overhead per microbatch by.
        told = terms & np.array([True, True, True, np.ptp(known.microbatches_n) > 0, True, True])
        theta, _ = _solve(known, seconds_n[rest], sync, told)
        features = _features(StackedLoads.of([loads[n] for n in held.tolist()]), sync, theta)
        errors_n[held] = np.abs(features @ theta / seconds_n[held] - 1.0)
    return errors_n
