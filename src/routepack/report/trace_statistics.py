"""What recorded routing looks like: coverage, hot experts, what groups prefer, what prompts tell about responses.

The three questions of arXiv 2604.23150, asked of any trace. Estimated sequences and masked rows count nowhere.
Letters: :mod:`routepack.core`; g groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.arrays import as_plain
from routepack.core.checks import instance, real
from routepack.core.errors import ConfigError
from routepack.core.files import without_nan
from routepack.core.rollouts import RolloutBatch, RoutingDemand, fed_tokens

MOST_GROUPS = 64
"""Groups that are compared pair by pair; of more, those with the most rows."""
SPLITS = 8
"""How often a group is halved at random, to tell how far apart two halves lie by chance alone."""
HOT_SHARE = 0.1
"""Share of a layer's experts that counts as its hot ones."""
PROMPT_SHARE = 0.5
"""Where a sequence is cut when nothing says where its prompt ends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coverage:
    """How much of the routing was recorded."""

    fed_tokens: int
    """Tokens fed in, one row each: all but the last of every sequence, and that one where its row was recorded."""
    recorded_rows: int
    """Rows that the counts below rest on."""
    masked_rows: int
    """Rows that the trace holds but declares unrecorded."""
    complete_sequences: int
    partial_sequences: int
    missing_sequences: int
    """Sequences without one recorded row, though tokens were fed in."""

    @property
    def share(self) -> float:
        """Recorded rows over fed tokens."""
        return self.recorded_rows / self.fed_tokens if self.fed_tokens else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerLoads:
    """How unevenly each MoE layer's rows fall on its experts. Shapes [L]."""

    layer_ids_L: np.ndarray
    hottest_L: np.ndarray
    """int64: the expert with the most rows."""
    hottest_rows_L: np.ndarray
    hottest_over_mean_L: np.ndarray
    """Its rows over the layer's mean expert (verl's max_vio + 1): 1 where all are even, E / K where every token chooses it."""
    coldest_over_mean_L: np.ndarray
    mean_deviation_L: np.ndarray
    """Mean of |rows - mean| / mean over experts."""
    variation_L: np.ndarray
    """Standard deviation over mean."""
    hot_share_L: np.ndarray
    """Share of the rows that the hottest tenth of the experts gets."""
    unused_L: np.ndarray
    """Experts without a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPopularity:
    """Which experts each group of sequences prefers: domains, task families, or rollouts of one prompt."""

    field: str
    num_groups: int
    group_g: np.ndarray
    """int64: the groups compared, most rows first."""
    sequences_g: np.ndarray
    rows_g: np.ndarray
    distance_gg: np.ndarray
    """Total variation between two groups' shares, mean over layers: the share of one's rows that would have to go
    elsewhere for both to be alike. 0 alike, 1 disjoint."""
    within_g: np.ndarray
    """Distance between random halves of one group, which is chance alone; nan for a group of one sequence."""
    hottest_g: list[tuple[int, int, float]]
    """Layer, expert, and share of the layer's rows of each group's hottest expert."""
    distinctive_g: list[tuple[int, int, float, float]]
    """Layer, expert, share in the group and share in all others, where the group is furthest above them."""

    @property
    def between(self) -> float:
        """Mean distance between two groups; nan for one group."""
        above = self.distance_gg[np.triu_indices(len(self.group_g), 1)]
        return float(above.mean()) if len(above) else float("nan")

    @property
    def within(self) -> float:
        """Mean distance between halves of a group; nan where no group has two sequences."""
        known = self.within_g[~np.isnan(self.within_g)]
        return float(known.mean()) if len(known) else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptResponse:
    """How far a request's prompt (prefill) activations tell its response's (decode)."""

    boundary: str
    """What said where prompts end: a field of the trace, or a cut of our own."""
    correlation_S: np.ndarray
    """Pearson correlation over experts, mean over layers, of the requests with rows on both sides."""
    other_S: np.ndarray
    """Correlation with the response of another request, which is due to experts that are popular everywhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingInspection:
    """All that an inspection finds in one trace."""

    source: str
    num_sequences: int
    num_tokens: int
    longest: int
    num_layers: int
    num_experts: int
    top_k: int
    coverage: Coverage
    layers: LayerLoads
    groups: GroupPopularity | None
    prompt_response: PromptResponse | None
    """None for a demand, which has forgotten the order of its rows."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; what is not known is None."""
        figures = asdict(self)
        figures["coverage"]["share"] = self.coverage.share
        if self.groups is not None:
            figures["groups"] |= {"between": self.groups.between, "within": self.groups.within}
        return without_nan(as_plain(figures))


def inspect_routing(
    window: RolloutBatch | RoutingDemand, *, by: str = "group", prompt_share: float | None = None, seed: int = 0
) -> RoutingInspection:
    """Inspect a trace, or a demand as far as counts go.

    Args:
        window: recorded rollouts, or their counts.
        by: what groups sequences: ``group`` (rollout group), or a per-sequence field of whole numbers.
        prompt_share: cut every sequence here instead of where its ``loss_mask`` or ``num_prompt_tokens`` says.
        seed: of the random halves and the pairing with other requests.

    Raises:
        ConfigError: no such field, or a share outside 0 .. 1.
        TraceError: an expert id outside 0 .. E - 1.

    """
    instance("window", window, (RolloutBatch, RoutingDemand))
    if isinstance(window, RolloutBatch):
        # No estimates: what was not recorded is not there.
        counts = RoutingDemandCollector(min_coverage=0.0).collect(window)
    else:
        counts = window if window.estimated_S is None else _without_estimates(window)
    source = window.source if isinstance(window, RolloutBatch) else window.name
    return RoutingInspection(
        source=source,
        num_sequences=counts.num_sequences,
        num_tokens=int(counts.length_S.sum()),
        longest=int(counts.length_S.max()),
        num_layers=counts.num_layers,
        num_experts=counts.num_experts,
        top_k=counts.top_k,
        coverage=_coverage(counts, fed_tokens(window) if isinstance(window, RolloutBatch) else None),
        layers=layer_loads(counts.tokens_LE, counts.layer_ids_L),
        groups=_groups(counts, *_group_of(window, by), seed),
        prompt_response=_prompt_response(window, prompt_share, seed) if isinstance(window, RolloutBatch) else None,
    )


def layer_loads(tokens_LE: np.ndarray, layer_ids_L: np.ndarray) -> LayerLoads:
    """How uneven int64 [L, E] routed rows are.

    >>> layer_loads(np.array([[6, 1, 1, 0]]), np.array([3])).hottest_over_mean_L.tolist()
    [3.0]
    """
    mean_L = np.maximum(tokens_LE.mean(axis=1), 1e-300)
    relative_LE = tokens_LE / mean_L[:, None]
    hot = max(1, round(HOT_SHARE * tokens_LE.shape[1]))
    hottest_L = tokens_LE.argmax(axis=1)
    return LayerLoads(
        layer_ids_L=layer_ids_L,
        hottest_L=hottest_L,
        hottest_rows_L=tokens_LE.max(axis=1),
        hottest_over_mean_L=relative_LE.max(axis=1),
        coldest_over_mean_L=relative_LE.min(axis=1),
        mean_deviation_L=np.abs(relative_LE - 1.0).mean(axis=1),
        variation_L=relative_LE.std(axis=1),
        hot_share_L=np.sort(tokens_LE, axis=1)[:, -hot:].sum(axis=1) / np.maximum(tokens_LE.sum(axis=1), 1),
        unused_L=(tokens_LE == 0).sum(axis=1),
    )


def _without_estimates(demand: RoutingDemand) -> RoutingDemand:
    tokens_SLE = demand.tokens_SLE.copy()
    tokens_SLE[demand.estimated_S] = 0
    return replace(demand, tokens_SLE=tokens_SLE, estimated_S=None)


def _coverage(counts: RoutingDemand, fed_S: np.ndarray | None) -> Coverage:
    """How much was recorded of *fed_S*, tokens fed in; None for a demand, which no longer knows if last tokens were fed in."""
    rows_S = counts.tokens_SLE[:, 0].sum(axis=1, dtype=np.int64) // counts.top_k
    fed_S = np.maximum(counts.length_S - 1, rows_S) if fed_S is None else fed_S
    complete, missing = int((rows_S == fed_S).sum()), int(((rows_S == 0) & (fed_S > 0)).sum())
    return Coverage(
        fed_tokens=int(fed_S.sum()),
        recorded_rows=int(rows_S.sum()),
        masked_rows=counts.num_masked_rows,
        complete_sequences=complete,
        partial_sequences=counts.num_sequences - complete - missing,
        missing_sequences=missing,
    )


def _group_of(window: RolloutBatch | RoutingDemand, by: str) -> tuple[str, np.ndarray | None]:
    if by == "group":
        return by, window.group_S
    fields = window.sequence_fields if isinstance(window, RolloutBatch) else {}
    if by not in fields or fields[by].ndim != 1 or fields[by].dtype.kind not in "iub":
        whole = sorted(name for name, value in fields.items() if value.ndim == 1 and value.dtype.kind in "iub")
        raise ConfigError(
            f"by={by!r} is no per-sequence field of whole numbers: choose group{''.join(f', {n}' for n in whole)}."
        )
    return by, fields[by].astype(np.int64)


def _groups(counts: RoutingDemand, field: str, group_S: np.ndarray | None, seed: int) -> GroupPopularity | None:
    if group_S is None:
        return None
    recorded_S = counts.tokens_SLE[:, 0].any(axis=1)
    names, group_of_S = np.unique(group_S, return_inverse=True)
    rows_S = counts.tokens_SLE[:, 0].sum(axis=1, dtype=np.int64) // counts.top_k
    rows_g = np.bincount(group_of_S, rows_S, len(names)).astype(np.int64)
    chosen = np.argsort(-rows_g, kind="stable")[:MOST_GROUPS]
    chosen = chosen[rows_g[chosen] > 0]
    if not len(chosen):
        return None
    members = [np.flatnonzero((group_of_S == g) & recorded_S) for g in chosen]
    tokens_gLE = np.stack([counts.tokens_SLE[member].sum(axis=0, dtype=np.int64) for member in members])
    share_gLE = _shares(tokens_gLE)
    rng = np.random.default_rng(seed)
    return GroupPopularity(
        field=field,
        num_groups=len(names),
        group_g=names[chosen],
        sequences_g=np.array([len(member) for member in members]),
        rows_g=rows_g[chosen],
        distance_gg=np.stack([_distance(share_gLE, share_LE) for share_LE in share_gLE]),
        within_g=np.array([_within(counts.tokens_SLE[member], rng) for member in members]),
        hottest_g=[_hottest(share_LE, counts.layer_ids_L) for share_LE in share_gLE],
        distinctive_g=[_distinctive(tokens_gLE, g, counts) for g in range(len(chosen))],
    )


def _shares(tokens_gLE: np.ndarray) -> np.ndarray:
    return tokens_gLE / np.maximum(tokens_gLE.sum(axis=-1, keepdims=True), 1)


def _distance(share_gLE: np.ndarray, share_LE: np.ndarray) -> np.ndarray:
    """float64 [g]: total variation, mean over layers."""
    return 0.5 * np.abs(share_gLE - share_LE).sum(axis=-1).mean(axis=-1)


def _within(tokens_SLE: np.ndarray, rng: np.random.Generator) -> float:
    sequences = len(tokens_SLE)
    if sequences < 2:
        return float("nan")
    found = []
    for _ in range(SPLITS):
        one = np.zeros(sequences, dtype=bool)
        one[rng.permutation(sequences)[: sequences // 2]] = True
        halves_2LE = np.stack([tokens_SLE[half].sum(axis=0, dtype=np.int64) for half in (one, ~one)])
        found.append(float(_distance(_shares(halves_2LE[:1]), _shares(halves_2LE[1]))[0]))
    return float(np.mean(found))


def _hottest(share_LE: np.ndarray, layer_ids_L: np.ndarray) -> tuple[int, int, float]:
    layer, expert = np.unravel_index(int(share_LE.argmax()), share_LE.shape)
    return int(layer_ids_L[layer]), int(expert), float(share_LE[layer, expert])


def _distinctive(tokens_gLE: np.ndarray, g: int, counts: RoutingDemand) -> tuple[int, int, float, float]:
    own_LE, others_LE = _shares(tokens_gLE[g]), _shares(counts.tokens_LE - tokens_gLE[g])
    layer, expert = np.unravel_index(int((own_LE - others_LE).argmax()), own_LE.shape)
    return int(counts.layer_ids_L[layer]), int(expert), float(own_LE[layer, expert]), float(others_LE[layer, expert])


def _prompt_response(batch: RolloutBatch, prompt_share: float | None, seed: int) -> PromptResponse | None:
    from routepack.solvers.expert_counts import count_experts

    boundary, response_T = _response_rows(batch, prompt_share)
    valid_T = np.ones(len(response_T), dtype=bool) if batch.valid_T is None else batch.valid_T
    prefill_SLE, decode_SLE = (
        count_experts(batch.routed_experts_TLK, batch.cu_seqlens, batch.num_experts, valid_T & rows_T)[0]
        for rows_T in (~response_T, response_T)
    )
    both_S = np.flatnonzero(prefill_SLE[:, 0].any(axis=1) & decode_SLE[:, 0].any(axis=1))
    if not len(both_S):
        return None
    # Shifting a shuffled order pairs everybody with another, never with itself (where there is another).
    order = np.random.default_rng(seed).permutation(both_S)
    other_S = np.empty(batch.num_sequences, dtype=np.int64)
    other_S[order] = np.roll(order, 1)
    return PromptResponse(
        boundary=boundary,
        correlation_S=_correlation(prefill_SLE, decode_SLE, both_S, both_S),
        other_S=_correlation(prefill_SLE, decode_SLE, both_S, other_S[both_S]) if len(both_S) > 1 else np.empty(0),
    )


def _response_rows(batch: RolloutBatch, prompt_share: float | None) -> tuple[str, np.ndarray]:
    """bool [T]: rows whose token was generated, not given; and what says so."""
    rows_S = np.diff(batch.cu_seqlens)
    position_T = np.arange(len(batch.routed_experts_TLK)) - np.repeat(batch.cu_seqlens[:-1], rows_S)
    if prompt_share is None and "loss_mask" in batch.token_fields:
        token_T = np.repeat(batch.cu_tokens[:-1], rows_S) + position_T
        return "loss_mask", batch.token_fields["loss_mask"].reshape(len(batch.token_fields["loss_mask"]), -1)[token_T, 0] > 0
    prompt_S = batch.sequence_fields.get("num_prompt_tokens")
    if prompt_share is None and prompt_S is not None and prompt_S.ndim == 1:
        return "num_prompt_tokens", position_T >= np.repeat(prompt_S, rows_S)
    share = PROMPT_SHARE if prompt_share is None else real("prompt_share", prompt_share, least=0.0, most=1.0)
    return f"cut at {share:.0%} of each sequence", position_T >= np.repeat(share * batch.num_tokens_S, rows_S)


def _correlation(prefill_SLE: np.ndarray, decode_SLE: np.ndarray, s: np.ndarray, other: np.ndarray) -> np.ndarray:
    """float64 [len(s)]: Pearson's over experts of prompt s and response *other*, mean over layers; 0 in an even layer."""
    found = np.empty(len(s))
    for start in range(0, len(s), 256):  # A slice at a time: in float64 the counts are four times as large.
        part = slice(start, start + 256)
        one, two = (tokens_SLE.astype(np.float64) for tokens_SLE in (prefill_SLE[s[part]], decode_SLE[other[part]]))
        one -= one.mean(axis=-1, keepdims=True)
        two -= two.mean(axis=-1, keepdims=True)
        norm = np.sqrt((one**2).sum(axis=-1) * (two**2).sum(axis=-1))
        found[part] = ((one * two).sum(axis=-1) / np.where(norm > 0, norm, 1.0)).mean(axis=-1)
    return found
