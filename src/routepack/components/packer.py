"""Sequences to cells: which microbatch of which DP rank. Letters: :mod:`routepack.core`."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, final

import numpy as np

from routepack.components import modalities
from routepack.core.component import Limits
from routepack.core.errors import ConfigError, InfeasibleError, PlanError
from routepack.core.plans import Certificate, Packing, PackingRules, Sync, Topology
from routepack.cost.models import CostRates


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
    modality_S: np.ndarray | None = None
    """int64 [S], where sequences of different modality must not share a microbatch; a packer sees one at a time."""
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
class Packer(PackingRules):
    """Packs sequences into cells. Subclasses implement :meth:`assign` and cannot return an illegal packing."""

    improves: ClassVar[bool] = False
    """Whether :meth:`assign` starts from ``start_cell_of_S``, so that packing again after a refined placement pays."""
    thread_safe: ClassVar[bool] = False
    """Whether :meth:`assign` may be called from several threads at once, each with a problem of its own. A subclass that
    overrides ``assign`` has to say so again; otherwise its calls never overlap."""

    max_tokens: Annotated[int, Limits(least=1)]
    """Tokens that one cell may hold."""
    certify_steps: Annotated[int, Limits(least=0)] = 100_000_000
    """How far bin completion searches where bound and packing differ: looks at a length, about 1 ns each; 0: not at all."""
    certify_seconds: Annotated[float, Limits(least=0.0, most=86_400.0)] = 0.0
    """How far CP-SAT (extra ``certify``) searches where that ends undecided: seconds of its deterministic clock."""

    def check_options(self) -> None:
        """Raise ConfigError where CP-SAT is asked for and not installed."""
        if self.certify_seconds and importlib.util.find_spec("ortools") is None:
            raise ConfigError(
                f"packer.certify_seconds={self.certify_seconds} asks CP-SAT, and ortools is not installed: "
                "pip install 'routepack[certify]', or set certify_seconds=0."
            )

    @property
    def rules(self) -> PackingRules:
        """What is asked of the microbatches beyond the cap."""
        return PackingRules(**{rule.name: getattr(self, rule.name) for rule in fields(PackingRules)})

    @abstractmethod
    def assign(self, problem: PackingProblem) -> np.ndarray:
        """int [S]: the cell of every sequence. All of 0 .. M x W - 1 used, none above the cap, for any M.

        -1 for a sequence that it found no room for: it is then asked again, with one microbatch more.
        """

    def typical_change(self, problem: PackingProblem) -> float:
        """A typical change of what is annealed, in the unit of the rates, by one proposal; 0 where nothing is annealed."""
        return 0.0

    @final
    def certify(
        self, length_S: np.ndarray, topology: Topology, *, seed: int = 0, modality_S: np.ndarray | None = None
    ) -> tuple[Certificate, np.ndarray]:
        """The fewest microbatches found, what proves it, and a legal packing with them.

        Raises InfeasibleError for a sequence longer than the cap, too few sequences to fill every cell (or those of one
        modality), or a number of sequences that cannot be dealt equally where that is asked for.
        """
        ranks = topology.data_parallel_degree
        self._check_window(length_S, ranks)
        if modality_S is not None and modalities.kinds_of(modality_S):
            self._check_no_equal_sequences()
            one = partial(self._certify_rows, ranks=ranks, seed=seed, rules=PackingRules())
            return modalities.certified(length_S, modality_S, ranks, self.rules, one)
        certificate, cell_of_S = self._certify_rows(length_S, ranks=ranks, seed=seed, rules=self.rules)
        if certificate.num_microbatches * ranks > len(length_S):
            raise InfeasibleError(self._too_few(certificate, len(length_S), ranks))
        if self.rules.counts_allowed(cell_of_S, ranks):
            return certificate, cell_of_S
        return self._certify_equal(certificate, cell_of_S, length_S, ranks)

    def _certify_rows(
        self, length_S: np.ndarray, *, ranks: int, seed: int, rules: PackingRules
    ) -> tuple[Certificate, np.ndarray]:
        from routepack.solvers import fewest_microbatches

        search = {"steps": self.certify_steps, "cp_sat_seconds": self.certify_seconds}
        return fewest_microbatches.certify_rows(length_S, self.max_tokens, ranks, seed=seed, rules=rules, **search)

    def _check_no_equal_sequences(self) -> None:
        if self.equal_sequences:
            raise InfeasibleError(
                "packer.equal_sequences=True cannot be kept in a window of several modalities, whose microbatches are packed "
                "apart: leave it off, or plan each modality for itself."
            )

    def _check_window(self, length_S: np.ndarray, ranks: int) -> None:
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
        if self.equal_sequences and not self.sequence_skew and len(length_S) % ranks:
            raise InfeasibleError(
                f"packer.equal_sequences=True needs a multiple of the {ranks} ranks of topology.data_parallel_degree; the "
                f"window has {len(length_S)} sequences: gather {-len(length_S) % ranks} more, drop {len(length_S) % ranks}, or "
                "set packer.sequence_skew=1."
            )

    def _too_few(self, certificate: Certificate, sequences: int, ranks: int) -> str:
        rows, rules = certificate.num_microbatches, self.rules
        asked = [f"packer.{name}={value}" for name, value in asdict(rules).items() if value > 1 and "microbatch" in name]
        known = "" if certificate.certified else f" ({certificate.lower_bound} might do: raise packer.certify_steps to know)"
        return (
            f"{' with '.join([f'packer.max_tokens={self.max_tokens}', *asked])} needs {rows} microbatches{known}, so "
            f"{rows * ranks} cells on {ranks} ranks, and the window has only {sequences} sequences to fill them: raise "
            f"max_tokens, {'lower ' + asked[-1].split('=')[0] + ', ' if asked else ''}or use fewer ranks."
        )

    def _certify_equal(
        self, certificate: Certificate, cell_of_S: np.ndarray, length_S: np.ndarray, ranks: int
    ) -> tuple[Certificate, np.ndarray]:
        """The same with ranks' numbers of sequences as the rules ask, in more microbatches where it takes them."""
        from routepack.solvers import greedy

        rows = certificate.num_microbatches
        while rows * ranks <= len(length_S):
            filled = greedy.fill_empty(cell_of_S, length_S, rows * ranks)
            if (equal := self._equalized(filled, length_S, ranks)) is not None:
                return replace(certificate, num_microbatches=rows, possible=rows), equal
            rows = self.rules.allowed(rows + 1)
        raise InfeasibleError(
            f"packer.equal_sequences=True: found no packing of the {len(length_S)} sequences under packer.max_tokens="
            f"{self.max_tokens} with numbers of sequences at most sequence_skew={self.sequence_skew} apart on {ranks} ranks: "
            "raise max_tokens or sequence_skew."
        )

    def _equalized(self, cell_of_S: np.ndarray, length_S: np.ndarray, ranks: int) -> np.ndarray | None:
        """The packing as the rules on ranks' numbers of sequences want it; None where none was found."""
        from routepack.solvers import equal_counts

        if self.rules.counts_allowed(cell_of_S, ranks):
            return cell_of_S
        limits = {"max_tokens": self.max_tokens, "num_ranks": ranks, "skew": self.sequence_skew}
        return equal_counts.equalized(cell_of_S, length_S, **limits)

    @final
    def pack(self, problem: PackingProblem) -> Packing:
        """The packing, checked.

        Where ``equal_sequences`` asks for it, sequences move between ranks until their numbers agree; a packing that
        cannot be evened out is replaced by ``problem.feasible_cell_of_S``. Sequences of several modalities are packed modality
        by modality, each into microbatches of its own.
        Raises PlanError naming the packer, the cell, its tokens and the cap.
        """
        apart = bool(modalities.kinds_of(problem.modality_S))
        cell_of_S = self._packed_apart(problem) if apart else self._packed(problem)
        ranks = problem.topology.data_parallel_degree
        self._check_cells(cell_of_S, problem.length_S, ranks)
        try:
            packing = Packing(
                cell_of_S=cell_of_S, num_microbatches=-(-int(cell_of_S.max() + 1) // ranks), data_parallel_degree=ranks
            )
        except PlanError as error:
            raise PlanError(f"{type(self).__name__}: {error}") from error
        if self.rules.counts_allowed(cell_of_S, ranks):
            return packing
        equal = self._equalized(cell_of_S, problem.length_S, ranks)
        cell_of_S = problem.feasible_cell_of_S if equal is None else equal
        rows = -(-int(cell_of_S.max() + 1) // ranks)
        return Packing(cell_of_S=cell_of_S, num_microbatches=rows, data_parallel_degree=ranks)

    def _packed(self, problem: PackingProblem) -> np.ndarray:
        cell_of_S = self._assigned(problem)
        while cell_of_S.min() < 0:
            problem = self._roomier(problem, cell_of_S)
            cell_of_S = self._assigned(problem)
        return cell_of_S

    def _packed_apart(self, problem: PackingProblem) -> np.ndarray:
        # What is asked of the number of microbatches is asked of all modalities together.
        packer, parts = replace(self, min_microbatches=1, microbatch_multiple=1), []
        ranks = problem.topology.data_parallel_degree
        for members, own in modalities.problems(problem):
            cell_of_S = packer._packed(own)
            packer._check_cells(cell_of_S, own.length_S, ranks)
            parts.append(modalities.Part(members=members, length_S=own.length_S, cell_of_S=cell_of_S, num_ranks=ranks))
        cell_of_S = modalities.stacked(parts, self.rules)
        return problem.feasible_cell_of_S if cell_of_S is None else cell_of_S

    def _check_cells(self, cell_of_S: np.ndarray, length_S: np.ndarray, ranks: int) -> None:
        tokens_C = np.bincount(cell_of_S, length_S).astype(np.int64)
        cell, rows = int(tokens_C.argmax()), -(-len(tokens_C) // ranks)
        if tokens_C[cell] > self.max_tokens:
            raise PlanError(
                f"{type(self).__name__} put {tokens_C[cell]} tokens into cell {cell} (microbatch {cell // ranks}, rank "
                f"{cell % ranks}); packer.max_tokens={self.max_tokens} is the cap."
            )
        if rows != self.rules.allowed(rows):
            raise PlanError(
                f"{type(self).__name__} made {rows} microbatches; packer.min_microbatches={self.min_microbatches} and "
                f"packer.microbatch_multiple={self.microbatch_multiple} ask for {self.rules.allowed(rows)}."
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "assign" in vars(cls) and "thread_safe" not in vars(cls):
            cls.thread_safe = False

    def _assigned(self, problem: PackingProblem) -> np.ndarray:
        given = replace(problem, length_S=problem.length_S.copy())
        assigned = self.assign(given)
        try:
            cell_of_S = np.asarray(assigned)
        except ValueError as error:
            raise PlanError(f"{type(self).__name__} gave cells that are no array: {error}.") from error
        if not np.array_equal(given.length_S, problem.length_S):
            raise PlanError(f"{type(self).__name__} changed problem.length_S: copy it first.")
        if cell_of_S.shape != problem.length_S.shape or cell_of_S.dtype.kind not in "iu":
            raise PlanError(
                f"{type(self).__name__} gave cells of shape {cell_of_S.shape} and dtype {cell_of_S.dtype}; "
                f"{len(problem.length_S)} whole numbers are needed."
            )
        s = int(cell_of_S.argmax())
        if int(cell_of_S[s]) >= len(cell_of_S):
            raise PlanError(
                f"{type(self).__name__} put sequence {s} into cell {cell_of_S[s]}: {len(cell_of_S)} sequences fill at most "
                f"cells 0 .. {len(cell_of_S) - 1}, and every cell needs one."
            )
        return cell_of_S.astype(np.int64, copy=False)

    def _roomier(self, problem: PackingProblem, cell_of_S: np.ndarray) -> PackingProblem:
        """The same problem with one microbatch more, where there are sequences enough to fill it."""
        from routepack.solvers import greedy

        s, rows = int(cell_of_S.argmin()), self.rules.allowed(problem.num_microbatches + 1)
        num_cells = rows * problem.topology.data_parallel_degree
        if cell_of_S[s] < -1 or num_cells > len(cell_of_S):
            raise PlanError(
                f"{type(self).__name__} left sequence {s} ({problem.length_S[s]} tokens) in cell {cell_of_S[s]}: cells start "
                f"at 0, and {len(cell_of_S)} sequences fill no more than {problem.num_microbatches} microbatches."
            )
        filled = greedy.fill_empty(problem.feasible_cell_of_S, problem.length_S, num_cells)
        feasible = self._equalized(filled, problem.length_S, problem.topology.data_parallel_degree)
        return replace(
            problem,
            num_microbatches=rows,
            feasible_cell_of_S=problem.feasible_cell_of_S if feasible is None else feasible,
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
        rows = self.rules.allowed(-(-used // ranks))
        if rows * ranks > len(cell_of_S):
            return problem.feasible_cell_of_S
        return greedy.fill_empty(cell_of_S, problem.length_S, rows * ranks)
