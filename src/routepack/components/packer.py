"""Sequences to cells: which microbatch of which DP rank. Letters: :mod:`routepack.types`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from routepack.cost import CostRates, num_packed_groups, ranks_per_group
from routepack.errors import ConfigError, InfeasibleError, PlanError
from routepack.types import Certificate, Packing, Sync, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class PackingProblem:
    """All that a packer may look at. Cell c is microbatch ``c // W`` of DP rank ``c % W``."""

    length_S: np.ndarray
    """int64 [S]: tokens."""
    load_SRL: np.ndarray
    """int32 [S, R, >= L]: routed rows to each EP rank in each layer under the placement; the layer axis may be zero-padded."""
    rates: CostRates
    topology: Topology
    max_tokens: int
    num_microbatches: int
    """M, the fewest that are known to do; a plan with more is legal, but no one's aim."""
    feasible_cell_of_S: np.ndarray
    """int32 [S]: a legal packing into so many microbatches."""
    start_cell_of_S: np.ndarray | None = None
    """int32 [S]: a good packing to start from, where there is one."""
    sync: Sync = "step"
    seed: int = 0
    num_proposals: int = 100_000
    """Moves and swaps that a search may try."""
    deadline: float | None = None
    """``time.monotonic()`` by which to be done; replaces ``num_proposals``."""
    temperatures: tuple[float, float] | None = None
    """Where a search by annealing begins and ends, in the unit of the rates; (0, 0) only accepts what is better.
    None: the packer finds its own, and ends with such a finish."""

    @property
    def num_cells(self) -> int:
        """M x W."""
        return self.num_microbatches * self.topology.data_parallel_degree

    @cached_property
    def cost_SI(self) -> np.ndarray:
        """float64 [S, I]: dense and attention work of each sequence in each attention stage."""
        return self.rates.cost_SI(self.length_S)

    @cached_property
    def cost_S(self) -> np.ndarray:
        """float64 [S]: the same, summed over stages."""
        return self.cost_SI.sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class Packer(ABC):
    """Packs sequences into cells. Subclasses implement :meth:`assign` and cannot return an illegal packing."""

    max_tokens: int
    """Tokens that one cell may hold."""

    improves: ClassVar[bool] = False
    """Whether :meth:`assign` starts from ``start_cell_of_S``, so that packing again after a refined placement pays."""

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int | np.integer) or self.max_tokens < 1:
            raise ConfigError(f"packer.max_tokens={self.max_tokens!r} must be a whole number of at least 1.")

    @abstractmethod
    def assign(self, problem: PackingProblem) -> np.ndarray:
        """int [S]: the cell of every sequence. All of 0 .. M x W - 1 used, none above the cap, for any M.

        -1 for a sequence that it found no room for: it is then asked again, with one microbatch more.
        """

    def typical_change(self, problem: PackingProblem) -> float:
        """A typical change of what is annealed, in the unit of the rates, by one proposal; 0 where nothing is annealed."""
        return 0.0

    @final
    def certify(self, length_S: np.ndarray, topology: Topology, *, seed: int = 0) -> tuple[Certificate, np.ndarray]:
        """The fewest microbatches found, what proves it, and a legal packing with them.

        Raises InfeasibleError for a sequence longer than the cap, or too few sequences to fill every cell.
        """
        from routepack.solvers import rows

        ranks = topology.data_parallel_degree
        if len(length_S) < ranks:
            raise InfeasibleError(
                f"topology.data_parallel_degree={ranks} ranks need a sequence each; the window has {len(length_S)}: "
                "use fewer ranks, or gather more sequences."
            )
        longest = int(np.argmax(length_S))
        if length_S[longest] > self.max_tokens:
            raise InfeasibleError(
                f"packer.max_tokens={self.max_tokens} is shorter than sequence {longest} ({length_S[longest]} tokens): "
                "raise it, or drop long sequences first."
            )
        certificate, cell_of_S = rows.certify_rows(length_S, self.max_tokens, ranks, seed=seed)
        if certificate.num_microbatches * ranks > len(length_S):
            raise InfeasibleError(
                f"packer.max_tokens={self.max_tokens} needs {certificate.num_microbatches} microbatches, so "
                f"{certificate.num_microbatches * ranks} cells on {ranks} ranks, and the window has only {len(length_S)} "
                "sequences to fill them: raise max_tokens, or use fewer ranks."
            )
        return certificate, cell_of_S

    @final
    def pack(self, problem: PackingProblem) -> Packing:
        """The packing, checked. Raises PlanError naming the packer, the cell, its tokens and the cap."""
        cell_of_S = self._assigned(problem)
        while cell_of_S.min() < 0:
            problem = self._roomier(problem, cell_of_S)
            cell_of_S = self._assigned(problem)
        ranks = problem.topology.data_parallel_degree
        tokens_C = np.bincount(cell_of_S, problem.length_S).astype(np.int64)
        cell = int(tokens_C.argmax())
        if tokens_C[cell] > self.max_tokens:
            raise PlanError(
                f"{type(self).__name__} put {tokens_C[cell]} tokens into cell {cell} (microbatch {cell // ranks}, rank "
                f"{cell % ranks}); packer.max_tokens={self.max_tokens} is the cap."
            )
        try:
            return Packing(cell_of_S=cell_of_S, num_microbatches=-(-len(tokens_C) // ranks), data_parallel_degree=ranks)
        except PlanError as error:
            raise PlanError(f"{type(self).__name__}: {error}") from error

    def _assigned(self, problem: PackingProblem) -> np.ndarray:
        cell_of_S = np.asarray(self.assign(problem))
        if cell_of_S.shape != problem.length_S.shape or cell_of_S.dtype.kind not in "iu":
            raise PlanError(
                f"{type(self).__name__} gave cells of shape {cell_of_S.shape} and dtype {cell_of_S.dtype}; "
                f"{len(problem.length_S)} whole numbers are needed."
            )
        return cell_of_S

    def _roomier(self, problem: PackingProblem, cell_of_S: np.ndarray) -> PackingProblem:
        """The same problem with one microbatch more, where there are sequences enough to fill it."""
        from routepack.solvers import greedy

        s, num_cells = int(cell_of_S.argmin()), problem.num_cells + problem.topology.data_parallel_degree
        if cell_of_S[s] < -1 or num_cells > len(cell_of_S):
            raise PlanError(
                f"{type(self).__name__} left sequence {s} ({problem.length_S[s]} tokens) in cell {cell_of_S[s]}: cells start "
                f"at 0, and {len(cell_of_S)} sequences fill no more than {problem.num_microbatches} microbatches."
            )
        return replace(
            problem,
            num_microbatches=problem.num_microbatches + 1,
            feasible_cell_of_S=greedy.fill_empty(problem.feasible_cell_of_S, problem.length_S, num_cells),
            start_cell_of_S=None,
        )


@dataclass(frozen=True, kw_only=True)
class FirstFitPacker(Packer):
    """First-fit decreasing: the baseline.

    Longest first, each into the first cell with room; cells that stay empty then get the longest sequence
    of the fullest cell that can spare one.
    """

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """First fit by falling length."""
        from routepack.solvers import greedy

        order_S = np.argsort(-problem.length_S, kind="stable")
        cell_of_S, used = greedy.first_fit(problem.length_S, self.max_tokens, order_S=order_S)
        ranks = problem.topology.data_parallel_degree
        rows = -(-used // ranks)
        if rows * ranks > len(cell_of_S):
            return problem.feasible_cell_of_S
        return greedy.fill_empty(cell_of_S, problem.length_S, rows * ranks)


@dataclass(frozen=True, kw_only=True)
class AttentionAwarePacker(Packer):
    """Anneals the packing on what its units wait for: attention of the costliest rank, experts of the fullest.

    Starts from the sequences dealt by tokens, longest first, and searches on the objective of the problem's
    ``sync``: under ``microbatch`` and ``layer`` the groups of a microbatch wait for one another.
    """

    improves: ClassVar[bool] = True

    threads: int = 2
    """Threads that anneal at once; the plan does not depend on it."""

    def assign(self, problem: PackingProblem) -> np.ndarray:
        """The best packing met."""
        from routepack.solvers import anneal

        layout = self._layout(problem)
        temperatures = problem.temperatures and tuple(heat * layout.energy_per_cost for heat in problem.temperatures)
        schedule = anneal.Schedule(
            num_proposals=problem.num_proposals,
            temperatures=temperatures,
            deadline=problem.deadline,
            threads=self.threads,
        )
        anneal.anneal(layout, schedule, seed=problem.seed)
        return layout.packed()

    def typical_change(self, problem: PackingProblem) -> float:
        """The median change by a feasible proposal, either way."""
        from routepack.solvers import anneal

        layout = self._layout(problem)
        return anneal.typical_change(layout, np.random.default_rng(problem.seed)) / layout.energy_per_cost

    def _layout(self, problem: PackingProblem) -> Any:
        from routepack.solvers.layout import JoinedLayout, Layout, Weights

        figures = {
            "cell_of_S": self._start(problem),
            "length_S": problem.length_S,
            "load_SRL": problem.load_SRL,
            "weights": Weights.of(problem.cost_SI, problem.rates.expert, int(problem.load_SRL.sum(dtype=np.int64))),
            "max_tokens": self.max_tokens,
            "num_cells": problem.num_cells,
            "cells_per_unit": ranks_per_group(problem.topology),
            "num_groups": num_packed_groups(problem.topology),
        }
        if problem.sync == "step" or figures["num_groups"] == 1:
            return Layout(**figures)
        return JoinedLayout(by_layer=problem.sync == "layer", **figures)

    def _start(self, problem: PackingProblem) -> np.ndarray:
        from routepack.solvers import greedy

        if problem.start_cell_of_S is not None:
            return problem.start_cell_of_S
        length_S = problem.length_S
        cell_of_S = greedy.longest_first(length_S, problem.num_cells, length_S=length_S, max_tokens=self.max_tokens)
        return problem.feasible_cell_of_S if (cell_of_S < 0).any() else cell_of_S
