"""For tests, ours and those of whoever writes a packer or a rerouter: windows to plan, and invariants to hold.

Letters: :mod:`routepack.core`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from routepack.components import modalities
from routepack.components.packer import Packer, PackingProblem
from routepack.components.placement_search import PackedUnits
from routepack.components.rerouter import Rerouter
from routepack.core.checks import whole
from routepack.core.errors import InfeasibleError, PlanError
from routepack.core.plans import ExpertPlacement, Topology
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.cost.models import WindowNormalizedCost, num_packed_groups


def synthetic_batch(
    *,
    num_sequences: int = 64,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    max_length: int = 512,
    group_size: int = 4,
    vocab_size: int = 1000,
    skew: float = 1.0,
    num_modalities: int = 1,
    seed: int = 0,
) -> RolloutBatch:
    """Rollouts with unequal lengths and skewed routing, made up from *seed*.

    Lengths are lognormal. Experts have a lognormal popularity per layer (*skew* is its sigma; 0 routes
    evenly) that every rollout group shakes a little. The last token of each sequence is not fed in. With *num_modalities*
    above 1, groups take turns in modality.

    >>> batch = synthetic_batch(num_sequences=8, max_length=32)
    >>> batch.num_sequences, batch.num_layers, batch.top_k
    (8, 4, 2)
    """
    sizes = {"num_sequences": num_sequences, "num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    for name, value in (sizes | {"group_size": group_size, "vocab_size": vocab_size, "num_modalities": num_modalities}).items():
        whole(name, value, least=1)
    whole("top_k", top_k, least=1, most=num_experts)
    whole("max_length", max_length, least=2)
    rng = np.random.default_rng(whole("seed", seed, least=0))
    num_tokens_S = np.clip(rng.lognormal(np.log(max_length / 4), 0.8, num_sequences), 2, max_length).astype(np.int64)
    group_S = np.arange(num_sequences) // group_size
    popularity_LE = rng.normal(0, skew, (num_layers, num_experts))
    own_gLE = rng.normal(0, skew / 2, (int(group_S.max()) + 1, num_layers, num_experts))
    ids = [_routes(rng, popularity_LE + own_gLE[g], n - 1, top_k) for g, n in zip(group_S, num_tokens_S, strict=True)]
    num_tokens = int(num_tokens_S.sum())
    is_first = np.zeros(num_tokens, dtype=bool)
    is_first[np.cumsum(num_tokens_S) - num_tokens_S] = True
    return RolloutBatch(
        routed_experts_TLK=np.concatenate(ids).astype(np.uint8 if num_experts <= 256 else np.int16),
        cu_seqlens=np.concatenate([[0], np.cumsum(num_tokens_S - 1)]),
        num_tokens_S=num_tokens_S,
        num_experts=num_experts,
        group_S=group_S,
        modality_S=group_S % num_modalities if num_modalities > 1 else None,
        token_fields={
            "token_ids": rng.integers(0, vocab_size, num_tokens),
            "loss_mask": ~is_first,
            "logprobs": np.where(is_first, 0, -rng.exponential(1.0, num_tokens)).astype(np.float32),
            "advantages": np.repeat(rng.normal(size=num_sequences), num_tokens_S).astype(np.float32),
        },
        sequence_fields={"rewards": rng.random(num_sequences).astype(np.float32)},
        source=f"synthetic, seed {seed}",
    )


def _routes(rng: np.random.Generator, popularity_LE: np.ndarray, rows: int, top_k: int) -> np.ndarray:
    """int [rows, L, K]: distinct experts, drawn without replacement by popularity (Gumbel top-k)."""
    scores = popularity_LE + rng.gumbel(size=(rows, *popularity_LE.shape))
    return np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]


def synthetic_demand(**options: Any) -> RoutingDemand:
    """The demand of :func:`synthetic_batch` with the same options, counted plainly.

    >>> synthetic_demand(num_sequences=8, max_length=32).tokens_SLE.shape
    (8, 4, 16)
    """
    batch = synthetic_batch(**options)
    sequence_T = np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))
    tokens_SLE = np.zeros((batch.num_sequences, batch.num_layers, batch.num_experts), dtype=np.int32)
    layer_L = np.arange(batch.num_layers)[None, :, None]
    np.add.at(tokens_SLE, (sequence_T[:, None, None], layer_L, batch.routed_experts_TLK), 1)
    return RoutingDemand(
        tokens_SLE=tokens_SLE,
        length_S=batch.num_tokens_S,
        top_k=batch.top_k,
        group_S=batch.group_S,
        modality_S=batch.modality_S,
        name=batch.source,
    )


def check_packer(packer: Packer, *, num_windows: int = 100, seed: int = 0) -> None:
    """Hold a packer to its invariants on random windows that fit its cap.

    Every packing is legal, the same problem gives the same packing, and the problem is left as it was. Some windows are of
    two modalities. Raises PlanError that says what went wrong, in which window.
    """
    rng, done, name = np.random.default_rng(seed), 0, type(packer).__name__
    while done < num_windows:
        problem = _random_problem(packer, rng)
        if problem is None:
            continue
        before = [array.copy() for array in _arrays_of(problem)]
        packing = packer.pack(problem)
        if not np.array_equal(packing.cell_of_S, packer.pack(problem).cell_of_S):
            raise PlanError(
                f"{type(packer).__name__} packed window {done} differently the second time: draw from problem.seed."
            )
        if not modalities.aligned(packing.cell_of_S, problem.modality_S, problem.topology.data_parallel_degree):
            raise PlanError(f"{name} mixed modalities in a microbatch of window {done}.")
        if not all(map(np.array_equal, before, _arrays_of(problem))):
            raise PlanError(f"{name} changed the arrays of window {done}: copy them first.")
        done += 1


def _random_problem(packer: Packer, rng: np.random.Generator) -> PackingProblem | None:
    topology = Topology(data_parallel_degree=int(rng.choice([1, 2, 4, 8])), expert_parallel_degree=1)
    ranks = int(rng.choice([r for r in (1, 2, 4) if topology.data_parallel_degree % r == 0]))
    topology = Topology(data_parallel_degree=topology.data_parallel_degree, expert_parallel_degree=ranks)
    num_sequences = int(rng.integers(topology.data_parallel_degree, 8 * topology.data_parallel_degree + 8))
    longest = packer.max_tokens if rng.random() < 0.3 else max(1, packer.max_tokens // 3)
    length_S = np.ceil(longest * rng.random(num_sequences) ** rng.choice([0.5, 1, 3])).astype(np.int64).clip(1, longest)
    popularity_LE = rng.dirichlet(np.full(8, 0.5), size=3)
    tokens_SLE = np.stack([rng.multinomial(n, popularity_LE) for n in length_S])
    demand = RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1)
    mixed = rng.random() < 0.3 and not packer.equal_sequences
    modality_S = rng.integers(0, 2, num_sequences) if mixed else None
    try:
        certificate, feasible_cell_of_S = packer.certify(length_S, topology, modality_S=modality_S)
    except InfeasibleError:
        return None
    return PackingProblem(
        length_S=length_S,
        load_SRL=tokens_SLE.reshape(num_sequences, 3, ranks, -1).sum(axis=-1).transpose(0, 2, 1).astype(np.int32),
        rates=WindowNormalizedCost().rates(demand, topology),
        topology=topology,
        max_tokens=packer.max_tokens,
        num_microbatches=certificate.num_microbatches,
        feasible_cell_of_S=feasible_cell_of_S,
        modality_S=modality_S,
        seed=int(rng.integers(2**31)),
        num_proposals=2000,
    )


def _arrays_of(problem: PackingProblem) -> list[np.ndarray]:
    return [problem.length_S, problem.load_SRL, problem.feasible_cell_of_S, problem.cost_SI]


def check_rerouter(rerouter: Rerouter, *, num_windows: int = 100, seed: int = 0) -> None:
    """Hold a rerouter to its invariants on random windows: legal placements, repeatable, inputs untouched.

    Where it has a search, the refined placement must not make the packed units wait longer. Raises PlanError.
    """
    rng, name = np.random.default_rng(seed), type(rerouter).__name__
    for window in range(num_windows):
        demand = synthetic_demand(num_sequences=16, max_length=64, num_experts=16, seed=int(rng.integers(2**31)))
        ranks = int(rng.choice([1, 2, 4, 8, 16]))
        topology = Topology(data_parallel_degree=2 * ranks, expert_parallel_degree=ranks)
        before_SLE = demand.tokens_SLE.copy()
        placement = rerouter.place(demand.tokens_LE, topology)
        again = rerouter.place(demand.tokens_LE, topology)
        if not np.array_equal(placement.physical_to_logical_LP, again.physical_to_logical_LP):
            raise PlanError(f"{name} placed window {window} differently the second time.")
        unit_of_S = rng.permutation(demand.num_sequences) % (2 * num_packed_groups(topology))
        search, units = rerouter.search(), PackedUnits(demand=demand, unit_of_S=unit_of_S, num_ranks=ranks)
        refined = search.refined(placement, units) if search else placement
        if _waited(refined, demand, unit_of_S, ranks) > _waited(placement, demand, unit_of_S, ranks):
            raise PlanError(f"{name} refined window {window} into a placement that waits longer.")
        if not np.array_equal(before_SLE, demand.tokens_SLE):
            raise PlanError(f"{name} changed the counts of window {window}: copy them first.")


def _waited(placement: ExpertPlacement, demand: RoutingDemand, unit_of_S: np.ndarray, ranks: int) -> int:
    """Sum over units and layers of the fullest rank."""
    slots_SLP = np.take_along_axis(demand.tokens_SLE, placement.physical_to_logical_LP[None].astype(np.int64), axis=2)
    load_SLR = slots_SLP.reshape(*slots_SLP.shape[:2], ranks, -1).sum(axis=-1)
    return sum(int(load_SLR[unit_of_S == u].sum(axis=0).max(axis=-1).sum()) for u in range(int(unit_of_S.max()) + 1))
