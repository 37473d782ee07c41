"""An independent checker of a plan against the window it was made for.

It shares no code with the cost models, the bounds or the solvers: whatever it agrees with was computed
twice, in two ways. Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from routepack.core.checks import instance
from routepack.core.errors import PlanError
from routepack.core.plans import Plan
from routepack.core.rollouts import RoutingDemand

TOLERANCE = 1e-9


def verify(plan: Plan, demand: RoutingDemand) -> list[str]:
    """What is wrong with *plan* for this window: one sentence each, none where it is accepted.

    Checks that the plan is what was planned (digests), that it is legal (whole sequences, cap, no empty cell,
    equal microbatches, whole experts on every rank), that its value, baseline, bound and certificate are
    what they claim, and that it is no worse than its baseline.
    """
    instance("plan", plan, Plan, error=PlanError)
    instance("demand", demand, RoutingDemand, error=PlanError)
    problems = [*_identity(plan, demand), *_shapes(plan, demand)]
    return problems or [*_cells(plan, demand), *_prices(plan, demand), *_bounds(plan, demand), *_rows(plan, demand)]


def _identity(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    if plan.content_digest() != plan.digest:
        yield "the plan was changed after it was made: its cells, order, slots, lengths or figures do not give its digest."
    if plan.demand_digest != demand.digest:
        yield "the plan was made for another window: the digest of its demand differs."
    if len(plan.length_S) == demand.num_sequences:
        for s in np.flatnonzero(plan.length_S != demand.length_S)[:1]:
            yield f"sequence {s} has {demand.length_S[s]} tokens in the window, and {plan.length_S[s]} in the plan."


def _shapes(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    topology, placed = plan.topology, plan.placement.physical_to_logical_LP
    if plan.packing.num_sequences != demand.num_sequences:
        yield f"the plan packs {plan.packing.num_sequences} sequences; the window has {demand.num_sequences}."
    if placed.shape != (demand.num_layers, demand.num_experts):
        yield f"the plan places {placed.shape} layers x experts; the window has {(demand.num_layers, demand.num_experts)}."
    elif any(sorted(row) != list(range(demand.num_experts)) for row in placed.tolist()):
        yield "a layer's slots do not hold every expert once."
    if demand.num_experts % topology.expert_parallel_degree:
        yield f"{demand.num_experts} experts do not divide over {topology.expert_parallel_degree} ranks."
    if plan.packing.data_parallel_degree != topology.data_parallel_degree:
        yield f"cells are for {plan.packing.data_parallel_degree} ranks; the topology has {topology.data_parallel_degree}."
    missing = [name for name in ("expert", "linear", "quadratic") if name not in plan.cost]
    if missing:
        yield f"the plan does not keep the rates that priced it: {', '.join(missing)}."


def _cells(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    ranks = plan.topology.data_parallel_degree
    num_cells = plan.num_microbatches * ranks
    held: list[list[int]] = [[] for _ in range(num_cells)]
    for s, cell in enumerate(plan.packing.cell_of_S.tolist()):
        if not 0 <= cell < num_cells:
            yield f"sequence {s} is in cell {cell}; there are {num_cells}."
            return
        held[cell].append(s)
    for cell, sequences in enumerate(held):
        tokens = int(demand.length_S[sequences].sum()) if sequences else 0
        where = f"cell {cell} (microbatch {cell // ranks}, rank {cell % ranks})"
        if not sequences:
            yield f"{where} is empty."
        if tokens > plan.max_tokens:
            yield f"{where} holds {tokens} tokens, above the cap of {plan.max_tokens}."
        if sorted(plan.packing.order_S[sequences].tolist()) != list(range(len(sequences))):
            yield f"{where} does not number its sequences 0, 1, 2, ..."
    tags = [0] * demand.num_sequences if demand.modality_S is None else demand.modality_S.tolist()
    for m in range(plan.num_microbatches):
        kinds = sorted({tags[s] for cell in held[m * ranks : (m + 1) * ranks] for s in cell})
        if len(kinds) > 1:
            yield f"microbatch {m} mixes sequences of modality {', '.join(map(str, kinds))}; each must hold one, on all ranks."


def _prices(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    slots = demand.num_experts // plan.topology.expert_parallel_degree
    rank_LE = np.empty((demand.num_layers, demand.num_experts), dtype=np.int64)
    for layer, row in enumerate(plan.placement.physical_to_logical_LP):
        rank_LE[layer, row] = np.arange(len(row)) // slots
    value = _value(plan, demand, plan.packing.cell_of_S, rank_LE)
    if not _close(plan.value, value):
        yield f"the plan is worth {value!r} under its rates and sync={plan.sync}, not {plan.value!r}."
    identity_LE = np.tile(np.arange(demand.num_experts) // slots, (demand.num_layers, 1))
    cell_S = _baseline(demand, plan)
    if cell_S is not None:
        baseline = _value(plan, demand, cell_S, identity_LE)
        if not _close(plan.baseline_value, baseline):
            yield f"identity placement and first-fit packing are worth {baseline!r}, not {plan.baseline_value!r}."
        needed = int(cell_S.max()) // plan.topology.data_parallel_degree + 1
        if plan.baseline_microbatches != needed:
            yield f"first fit takes {needed} microbatches, not {plan.baseline_microbatches}."
    # First fit may take more microbatches, and unequal numbers of sequences: a comparison then, not a plan to fall back on.
    no_plan = plan.rules.equal_sequences or plan.baseline_microbatches > plan.num_microbatches
    if plan.value > plan.baseline_value * (1 + TOLERANCE) and not no_plan:
        yield f"the plan ({plan.value!r}) is worse than its baseline ({plan.baseline_value!r})."
    yield from _normalisation(plan, demand)


def _normalisation(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    """Under the window-normalised cost a perfectly even window is worth the shares."""
    if plan.cost.get("model") != "WindowNormalizedCost":
        return
    options, tokens = plan.cost.get("options", {}), demand.length_S.astype(np.float64)
    shares = [options.get(f"{name}_share") for name in ("expert", "linear", "quadratic")]
    if not all(isinstance(share, float | int) and math.isfinite(share) for share in shares):
        yield "the plan does not keep the shares of its WindowNormalizedCost."
        return
    ranks = plan.topology.data_parallel_degree
    groups = ranks // _group_width(plan)
    rows = float(demand.tokens_SLE.sum(dtype=np.float64)) / (groups * plan.topology.expert_parallel_degree)
    names, evens = (
        ("expert", "linear", "quadratic"),
        (
            plan.cost["expert"] * rows,
            plan.cost["linear"][0] * tokens.sum() / ranks,
            plan.cost["quadratic"][0] * (tokens**2).sum() / ranks,
        ),
    )
    for name, share, even in zip(names, shares, evens, strict=True):
        if rows and not _close(share, even):
            yield f"an even window costs {even!r} by the {name} rate, not its share {share!r}."


def _group_width(plan: Plan) -> int:
    """DP ranks of one EP group, counted from the topology's own map."""
    return int(np.count_nonzero(plan.topology.group_of_W == plan.topology.group_of_W[0]))


def _work(plan: Plan, demand: RoutingDemand) -> np.ndarray:
    """float64 [I, S]: what each sequence costs in each attention stage."""
    stages = len(plan.cost["linear"])
    windows = plan.cost.get("window") or [0] * stages
    tokens, work = demand.length_S.astype(np.float64), []
    for linear, quadratic, window in zip(plan.cost["linear"], plan.cost["quadratic"], windows, strict=True):
        pairs = tokens * tokens
        if window:
            pairs = pairs - np.maximum(0.0, tokens - window) ** 2
        work.append(linear * tokens + quadratic * pairs)
    return np.array(work)


def _value(plan: Plan, demand: RoutingDemand, cell_S: np.ndarray, rank_LE: np.ndarray) -> float:
    """The step's prediction, summed up microbatch by microbatch, group by group, layer by layer."""
    ranks, width = plan.topology.data_parallel_degree, _group_width(plan)
    work_IS, onto = _work(plan, demand), np.eye(plan.topology.expert_parallel_degree, dtype=np.int64)[rank_LE]
    group_cost, total = np.zeros(ranks // width), 0.0
    for m in range(int(cell_S.max()) // ranks + 1):
        work, peaks, links = [], [], []
        for g in range(ranks // width):
            cells = [np.flatnonzero(cell_S == m * ranks + g * width + w) for w in range(width)]
            work.append([work_IS[:, cell].sum(axis=1) for cell in cells])
            routed_LE = demand.tokens_SLE[np.concatenate(cells)].sum(axis=0, dtype=np.int64)
            peaks.append((routed_LE[:, None, :] @ onto)[:, 0].max(axis=1))
            links.append(_links(plan, demand, cells, g, rank_LE))
        work_GWI, peak_GL, links_GL = np.array(work), np.array(peaks), np.array(links)
        cost_G = work_GWI.max(axis=1).sum(axis=1) + plan.cost["expert"] * peak_GL.sum(axis=1) + links_GL.sum(axis=1)
        group_cost += cost_G
        joined = work_GWI.max(axis=(0, 1)).sum() + plan.cost["expert"] * peak_GL.max(axis=0).sum()
        joined += links_GL.max(axis=0).sum()
        total += float(joined if plan.sync == "layer" else cost_G.max())
    return float(group_cost.max()) if plan.sync == "step" else total


def _links(plan: Plan, demand: RoutingDemand, cells: list[np.ndarray], group: int, rank_LE: np.ndarray) -> np.ndarray:
    """float64 [L]: what the busiest rank's links cost in one unit, inside its node and across nodes."""
    inside, across = plan.cost.get("inside", 0.0), plan.cost.get("across", 0.0)
    ranks, shared = plan.topology.expert_parallel_degree, plan.topology.model_parallel_degree
    layers = len(rank_LE)
    if ranks == 1 or not (inside or across):
        return np.zeros(layers)
    out, received = np.zeros((2, ranks, layers)), np.zeros((2, ranks, layers))
    first = group * ranks
    for sender in range(ranks):
        rows_LE = demand.tokens_SLE[cells[sender // shared]].sum(axis=0, dtype=np.int64) / shared
        for target in range(ranks):
            rows_L = np.where(rank_LE == target, rows_LE, 0.0).sum(axis=1)
            far = (first + sender) // plan.topology.ranks_per_node != (first + target) // plan.topology.ranks_per_node
            if sender != target:
                out[int(far), sender] += rows_L
                received[int(far), target] += rows_L
    near_L, far_L = np.maximum(out.max(axis=1), received.max(axis=1))
    return inside * near_L + across * far_L


def _kinds(demand: RoutingDemand) -> list[np.ndarray]:
    """The sequences that may share a microbatch, modality by modality."""
    tags = [0] * demand.num_sequences if demand.modality_S is None else demand.modality_S.tolist()
    return [np.array([s for s, tag in enumerate(tags) if tag == kind]) for kind in sorted(set(tags))]


def _baseline(demand: RoutingDemand, plan: Plan) -> np.ndarray | None:
    """First fit, modality by modality, in as many microbatches as are asked for; None where too few sequences fill them."""
    ranks, kinds = plan.topology.data_parallel_degree, _kinds(demand)
    opened = [_first_fit(demand.length_S[kind], plan.max_tokens) for kind in kinds]
    rows = [-(-int(cell.max() + 1) // ranks) for cell in opened]
    asked = _asked(plan, sum(rows))
    if asked * ranks > demand.num_sequences:
        return None
    for _ in range(asked - sum(rows)):
        spare = [len(kind) - row * ranks for kind, row in zip(kinds, rows, strict=True)]
        rows[spare.index(max(spare))] += 1
    if any(row * ranks > len(kind) for kind, row in zip(kinds, rows, strict=True)):
        return None
    cell_S, before = np.empty(demand.num_sequences, dtype=np.int64), 0
    for kind, cell, row in zip(kinds, opened, rows, strict=True):
        cell_S[kind] = before * ranks + _filled(cell, demand.length_S[kind], row * ranks)
        before += row
    return cell_S


def _first_fit(length_S: np.ndarray, cap: int) -> np.ndarray:
    """First-fit decreasing."""
    cell_S, tokens = np.empty(len(length_S), dtype=np.int64), np.zeros(len(length_S), dtype=np.int64)
    for s in sorted(range(len(length_S)), key=lambda s: (-length_S[s], s)):
        cell_S[s] = np.argmax(tokens + length_S[s] <= cap)
        tokens[cell_S[s]] += length_S[s]
    return cell_S


def _filled(cell_S: np.ndarray, length_S: np.ndarray, num_cells: int) -> np.ndarray:
    """Empty cells take the longest sequence of the fullest cell with more than one."""
    held = np.bincount(cell_S, minlength=num_cells)
    filled = np.zeros(num_cells, dtype=np.int64)
    np.add.at(filled, cell_S, length_S)
    for empty in range(int(cell_S.max()) + 1, num_cells):
        giver = int(np.argmax(filled * (held > 1)))
        members = np.flatnonzero(cell_S == giver).tolist()
        moved = max(members, key=lambda s: (length_S[s], -s))
        cell_S[moved] = empty
        held[giver], held[empty] = held[giver] - 1, 1
        filled[giver], filled[empty] = filled[giver] - length_S[moved], length_S[moved]
    return cell_S


def _bounds(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    proven = _proven_bound(plan, demand)
    if plan.bound > proven * (1 + TOLERANCE):
        yield f"the plan claims a bound of {plan.bound!r}; no more than {proven!r} can be proven."
    if plan.bound > plan.value * (1 + TOLERANCE):
        yield f"the plan's value {plan.value!r} lies below its bound {plan.bound!r}."


def _proven_bound(plan: Plan, demand: RoutingDemand) -> float:
    ranks, width = plan.topology.data_parallel_degree, _group_width(plan)
    work_IS, groups = _work(plan, demand), ranks // width
    attention = sum(_attention(work, demand.length_S, width, plan.max_tokens) for work in work_IS) / groups
    if plan.sync == "layer":
        joined = sum(_attention(work, demand.length_S, ranks, plan.max_tokens) for work in work_IS)
        attention = max(attention, joined)
    fullest = sum(_fullest_rank(row, plan.topology.expert_parallel_degree) for row in demand.tokens_LE.tolist())
    return float(attention + plan.cost["expert"] * fullest / groups)


def _fullest_rank(loads: list[int], ranks: int) -> int:
    loads, slots = sorted(loads), len(loads) // ranks
    hottest = loads[-1] + sum(loads[: slots - 1])
    shared = loads[-ranks] + loads[-ranks - 1] + sum(loads[: slots - 2]) if slots > 1 else 0
    return max(-(-sum(loads) // ranks), hottest, shared)


def _attention(work_S: np.ndarray, length_S: np.ndarray, width: int, cap: int) -> float:
    """Even work; or the costliest sequence's unit, filled as far as the cap lets it, and the rest even."""
    costliest = int(work_S.argmax())
    room, beside = (width - 1) * cap, 0.0
    for s in sorted(range(len(length_S)), key=lambda s: -length_S[s]):
        if s != costliest and room > 0:
            taken = min(room, int(length_S[s]))
            beside += work_S[s] * taken / length_S[s]
            room -= taken
    rest = work_S.sum() - min(width * work_S[costliest], work_S[costliest] + beside)
    return max(work_S.sum() / width, work_S[costliest] + rest / width)


def _rows(plan: Plan, demand: RoutingDemand) -> Iterator[str]:
    certificate, ranks = plan.certificate, plan.topology.data_parallel_degree
    total = 0
    for kind in _kinds(demand):
        length_S = demand.length_S[kind]
        bins = max(_bins_needed(length_S, plan.max_tokens, a) for a in {0, *length_S.tolist()})
        needed = -(-bins // ranks)
        while needed < certificate.lower_bound and _fits(length_S, plan.max_tokens, needed * ranks) is False:
            needed += 1
        total += needed
    needed = _asked(plan, total)
    if certificate.lower_bound > needed:
        yield f"{certificate.lower_bound} microbatches are claimed to be needed; only {needed} are shown to be."
    if plan.num_microbatches != _asked(plan, plan.num_microbatches):
        yield (
            f"{plan.num_microbatches} microbatches are fewer than min_microbatches={plan.rules.min_microbatches}, or no "
            f"multiple of microbatch_multiple={plan.rules.microbatch_multiple}."
        )
    if plan.rules.equal_sequences:
        held = [0] * ranks
        for cell in plan.packing.cell_of_S.tolist():
            held[cell % ranks] += 1
        if max(held) - min(held) > plan.rules.sequence_skew:
            yield f"ranks get {min(held)} to {max(held)} sequences; at most {plan.rules.sequence_skew} apart are asked for."
    fits = certificate.lower_bound <= certificate.possible <= certificate.num_microbatches
    if not fits or certificate.num_microbatches != plan.num_microbatches:
        yield f"the certificate ({certificate}) does not fit the plan's {plan.num_microbatches} microbatches."


def _asked(plan: Plan, rows: int) -> int:
    """The fewest microbatches, of so many or more, that the plan's rules allow."""
    rows = max(rows, plan.rules.min_microbatches)
    return rows + -rows % plan.rules.microbatch_multiple


def _fits(length_S: np.ndarray, cap: int, bins: int, tries: int = 300_000) -> bool | None:
    """Whether the sequences fit into so many bins, by trying every bin of another filling; None after so many tries."""
    lengths, left = sorted(length_S.tolist(), reverse=True), [tries]
    after = [sum(lengths[i:]) for i in range(len(lengths) + 1)]
    impossible: set[tuple[int, tuple[int, ...]]] = set()

    def place(i: int, rooms: tuple[int, ...]) -> bool | None:
        if i == len(lengths):
            return True
        usable = sum(room for room in rooms if room >= lengths[-1])
        if after[i] > usable or (i, rooms) in impossible:
            return False
        undecided = False
        for room in sorted({room for room in rooms if room >= lengths[i]}):
            left[0] -= 1
            if left[0] < 0:
                return None
            rest = list(rooms)
            rest[rest.index(room)] -= lengths[i]
            answer = place(i + 1, tuple(sorted(rest)))
            if answer:
                return True
            undecided |= answer is None
        if not undecided:
            impossible.add((i, rooms))
        return None if undecided else False

    if len(lengths) > 500:  # Deeper than Python recurses, and larger than trying can settle.
        return None
    return place(0, (cap,) * bins)


def _bins_needed(length_S: np.ndarray, cap: int, least: int) -> int:
    """Bins for the sequences of at least *least* tokens: those above half the cap, and what fits beside none of them."""
    if least > cap // 2:
        return 0
    large = length_S[length_S > cap // 2]
    partly = large[large <= cap - least]
    small = length_S[(length_S >= least) & (length_S <= cap // 2)]
    overflow = int(small.sum()) - (len(partly) * cap - int(partly.sum()))
    return len(large) + max(0, -(-overflow // cap))


def _close(claimed: float, found: float) -> bool:
    return abs(claimed - found) <= TOLERANCE * max(abs(claimed), abs(found))
