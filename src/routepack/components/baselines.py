"""What others do, as packers and rerouters: to compare with, and to never fall behind. Letters: :mod:`routepack.core`.

Each is written from its published description, named in its docstring, and held to RoutePack's rules: no cell above the
cap, none empty, whole experts, equally many a rank, no replicas. Where a method as published breaks a rule, its
docstring says what it does here instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from routepack.components.packer import FirstFitPacker, Packer, PackingProblem
from routepack.components.rerouter import IdentityRerouter, Rerouter
from routepack.core.component import Count
from routepack.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TokenLPTPacker(Packer):
    """Longest sequence first, each into the cell with the fewest tokens (R. L. Graham 1969: LPT).

    Where one finds no room, the packing that proves the number of microbatches stands in.
    """

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """LPT by tokens."""
        from routepack.solvers import start_packings

        cell_of_S = start_packings.by_tokens(problem.length_S, problem.num_cells, self.max_tokens)
        return problem.feasible_cell_of_S if cell_of_S is None else cell_of_S


@dataclass(frozen=True, kw_only=True)
class ModifiedFirstFitPacker(Packer):
    """Modified first-fit decreasing (Johnson and Garey 1985), NeMo-RL's default for packing sequences.

    Bins that are missing to whole microbatches, or to those asked for, each get the longest sequence of the fullest bin
    that can spare one.
    """

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """Five passes by size class."""
        from routepack.solvers import greedy
        from routepack.solvers.modified_first_fit import modified_first_fit

        cell_of_S, used = modified_first_fit(problem.length_S, self.max_tokens)
        ranks = problem.topology.data_parallel_degree
        num_cells = self.rules.allowed(-(-used // ranks)) * ranks
        if num_cells > len(cell_of_S):
            return problem.feasible_cell_of_S
        return greedy.fill_empty(cell_of_S, problem.length_S, num_cells)


@dataclass(frozen=True, kw_only=True)
class KarmarkarKarpPacker(Packer):
    """Largest differencing in two steps, as verl packs: sequences to DP ranks, then each rank's to microbatches.

    Both steps balance the work of a sequence, linear and quadratic, under the cost model. verl takes ceil(tokens / cap)
    microbatches of the fullest rank and may overfill them; here one microbatch more is taken until every cell of every
    rank keeps the cap, and a rank with too few sequences to fill its own gets the shortest of another's. Where no number
    does, the packing that proves it can be done stands in.

    Source: N. Karmarkar, R. M. Karp, *The differencing method of set partitioning* (1982); verl's documentation of
    ``balance_batch`` and ``use_dynamic_bsz``.
    """

    equal_counts: bool = True
    """Whether ranks get equally many sequences (at most one apart), as verl's ``balance_batch`` does."""

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """Differencing over the ranks, then over the microbatches of each."""
        from routepack.solvers.differencing import largest_differencing

        ranks, cost_S, length_S = problem.topology.data_parallel_degree, problem.cost_S, problem.length_S
        rank_of_S = largest_differencing(cost_S, ranks, equal_counts=self.equal_counts)
        fullest = int(np.bincount(rank_of_S, length_S, ranks).max())
        rows = self.rules.allowed(max(problem.num_microbatches, -(-fullest // self.max_tokens)))
        while rows * ranks <= len(length_S):
            rank_of_S = _fed(rank_of_S, length_S, ranks, rows)
            cell_of_S = self._rows_of_each(rank_of_S, cost_S, ranks, rows)
            tokens_C = np.bincount(cell_of_S, length_S, rows * ranks)
            if tokens_C.max() <= self.max_tokens and tokens_C.min() > 0:
                return cell_of_S
            rows = self.rules.allowed(rows + 1)
        return problem.feasible_cell_of_S

    def _rows_of_each(self, rank_of_S: np.ndarray, cost_S: np.ndarray, ranks: int, rows: int) -> np.ndarray:
        from routepack.solvers.differencing import largest_differencing

        cell_of_S = np.empty(len(rank_of_S), dtype=np.int32)
        for rank in range(ranks):
            held = np.flatnonzero(rank_of_S == rank)
            cell_of_S[held] = largest_differencing(cost_S[held], rows) * ranks + rank
        return cell_of_S


def _fed(rank_of_S: np.ndarray, length_S: np.ndarray, ranks: int, rows: int) -> np.ndarray:
    """The ranks of sequences, with the shortest of the ranks that have most given to those that have fewer than *rows*."""
    rank_of_S, count_W = rank_of_S.copy(), np.bincount(rank_of_S, minlength=ranks)
    while count_W.min() < rows:
        giver, taker = int(count_W.argmax()), int(count_W.argmin())
        held = np.flatnonzero(rank_of_S == giver)
        rank_of_S[held[np.argmin(length_S[held])]] = taker
        count_W[giver] -= 1
        count_W[taker] += 1
    return rank_of_S


@dataclass(frozen=True, kw_only=True)
class UnequalKarmarkarKarpPacker(KarmarkarKarpPacker):
    """The same with ranks balanced by work alone, whatever the number of their sequences."""

    equal_counts: bool = False
    """Whether ranks get equally many sequences."""


@dataclass(frozen=True, kw_only=True)
class LPTRerouter(Rerouter):
    """Hottest expert first, each to the rank with the lowest load that has a slot left (LPT with equal counts)."""

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """LPT, layer by layer."""
        return np.stack([_packed(tokens_E, num_ranks).ravel() for tokens_E in tokens_LE]).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class EPLBRerouter(Rerouter):
    """DeepSeek's expert-parallel load balancer without redundant experts.

    Its balanced packing puts the hottest item first into the lightest pack with a place left. Flat, that packs experts
    into ranks (and equals :class:`LPTRerouter`); hierarchical, for group-limited routing, it packs expert groups into nodes
    and the experts of a node into its ranks. Replicas, its third step, are not counted: every expert has one slot.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.4, and the description of EPLB's policies.
    """

    num_groups: Count = 1
    """Expert groups of the router, consecutive experts each."""
    num_nodes: Count = 1
    """Nodes, consecutive ranks each. Where they do not divide the groups, placement is flat and says so in the log."""

    def assign(self, tokens_LE: np.ndarray, num_ranks: int) -> np.ndarray:
        """Balanced packing, hierarchical where the groups divide over the nodes."""
        experts = tokens_LE.shape[1]
        if num_ranks % self.num_nodes:
            raise ConfigError(
                f"rerouter.num_nodes={self.num_nodes} does not divide the {num_ranks} ranks of "
                "topology.expert_parallel_degree: choose a divisor, or num_nodes=1 for flat placement."
            )
        if experts % self.num_groups:
            raise ConfigError(f"rerouter.num_groups={self.num_groups} does not divide the {experts} experts.")
        nodes, groups = self.num_nodes, self.num_groups
        if groups % nodes:
            logging.getLogger(__name__).warning(
                "rerouter.num_groups=%d expert groups do not divide over num_nodes=%d: experts are placed flat.", groups, nodes
            )
            nodes = groups = 1
        return np.stack([_hierarchical(tokens_E, groups, nodes, num_ranks) for tokens_E in tokens_LE]).astype(np.int32)


def _hierarchical(tokens_E: np.ndarray, groups: int, nodes: int, ranks: int) -> np.ndarray:
    """int [P]: experts in slots; groups packed into nodes, then each node's experts into its ranks."""
    expert_gK = np.arange(len(tokens_E)).reshape(groups, -1)
    slots = []
    for held in _packed(tokens_E[expert_gK].sum(axis=1), nodes):
        experts = expert_gK[np.sort(held)].ravel()
        slots.append(experts[_packed(tokens_E[experts], ranks // nodes)].ravel())
    return np.concatenate(slots)


def _packed(load_I: np.ndarray, packs: int) -> np.ndarray:
    """int [packs, I / packs]: balanced packing, the heaviest item first into the lightest pack with a place left."""
    places = len(load_I) // packs
    held: list[list[int]] = [[] for _ in range(packs)]
    load = [0] * packs
    for item in np.argsort(-load_I, kind="stable").tolist():
        pack = min((p for p in range(packs) if len(held[p]) < places), key=load.__getitem__)
        held[pack].append(item)
        load[pack] += int(load_I[item])
    return np.array(held)


PACKERS: tuple[type[Packer], ...] = (
    FirstFitPacker,
    TokenLPTPacker,
    ModifiedFirstFitPacker,
    KarmarkarKarpPacker,
    UnequalKarmarkarKarpPacker,
)
"""Packers that a search must not fall behind."""
REROUTERS: tuple[Rerouter, ...] = (IdentityRerouter(), LPTRerouter())
"""Rerouters likewise; flat EPLB places as LPT does."""
