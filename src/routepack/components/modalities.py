"""Windows whose sequences differ in modality: every microbatch of one, on all ranks. Letters: :mod:`routepack.core`.

Text and images run different graphs, and ranks that run different collectives in the same microbatch wait for ever. So
each modality is packed for itself, into microbatches of its own, and the packings are stacked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from routepack.core.errors import InfeasibleError
from routepack.core.plans import Certificate, PackingRules


def kinds_of(modality_S: np.ndarray | None) -> list[np.ndarray]:
    """The sequences of each modality, lowest number first; nothing where there is but one modality.

    >>> [members.tolist() for members in kinds_of(np.array([7, 3, 7]))], kinds_of(np.array([1, 1]))
    ([[1], [0, 2]], [])
    """
    if modality_S is None:
        return []
    kinds = np.unique(modality_S)
    return [np.flatnonzero(modality_S == kind) for kind in kinds] if len(kinds) > 1 else []


def aligned(cell_of_S: np.ndarray, modality_S: np.ndarray | None, num_ranks: int) -> bool:
    """Whether every microbatch holds sequences of one modality."""
    if modality_S is None:
        return True
    row_of_S = cell_of_S // num_ranks
    some_M = np.zeros(int(row_of_S.max()) + 1, dtype=np.int64)
    some_M[row_of_S] = modality_S
    return bool((some_M[row_of_S] == modality_S).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One modality's packing: the sequences it packs, and their cells counted from the modality's own first microbatch."""

    members: np.ndarray
    length_S: np.ndarray
    cell_of_S: np.ndarray
    num_ranks: int

    @property
    def rows(self) -> int:
        """Its microbatches."""
        return -(-int(self.cell_of_S.max() + 1) // self.num_ranks)

    @property
    def spare(self) -> int:
        """Sequences beyond one a cell."""
        return len(self.members) - self.rows * self.num_ranks

    def with_a_row_more(self) -> Part:
        """The same in one microbatch more."""
        from routepack.solvers import greedy

        num_cells = (self.rows + 1) * self.num_ranks
        return replace(self, cell_of_S=greedy.fill_empty(self.cell_of_S, self.length_S, num_cells))


def stacked(parts: list[Part], rules: PackingRules) -> np.ndarray | None:
    """int32 [S]: the parts one after another, with as many microbatches as the rules ask.

    Those that are missing go one by one to the modality with most sequences to spare; None where none can fill one.
    """
    parts, rows = list(parts), sum(part.rows for part in parts)
    for _ in range(rules.allowed(rows) - rows):
        most = max(range(len(parts)), key=lambda i: parts[i].spare)
        if parts[most].spare < parts[most].num_ranks:
            return None
        parts[most] = parts[most].with_a_row_more()
    cell_of_S, first = np.empty(sum(len(part.members) for part in parts), dtype=np.int32), 0
    for part in parts:
        cell_of_S[part.members] = first * part.num_ranks + part.cell_of_S
        first += part.rows
    return cell_of_S


def certified(
    length_S: np.ndarray,
    modality_S: np.ndarray,
    num_ranks: int,
    rules: PackingRules,
    certify: Callable[[np.ndarray], tuple[Certificate, np.ndarray]],
) -> tuple[Certificate, np.ndarray]:
    """The fewest microbatches, each of one modality, what proves it, and a packing: the sums of each modality's own.

    *certify* answers for one modality, without rules. Raises InfeasibleError naming the modality that has too few sequences.
    """
    parts, certificates = [], []
    for members in kinds_of(modality_S):
        certificate, cell_of_S = certify(length_S[members])
        rows, name = certificate.num_microbatches, int(modality_S[members[0]])
        if rows * num_ranks > len(members):
            raise InfeasibleError(
                f"modality {name} has {len(members)} sequences and needs {rows} microbatches of its own, {rows * num_ranks} "
                f"cells on topology.data_parallel_degree={num_ranks} ranks: gather more of it, drop it, or use fewer ranks."
            )
        parts.append(Part(members=members, length_S=length_S[members], cell_of_S=cell_of_S, num_ranks=num_ranks))
        certificates.append(certificate)
    cell_of_S = stacked(parts, rules)
    if cell_of_S is None:
        raise InfeasibleError(
            f"{sum(part.rows for part in parts)} microbatches of {len(parts)} modalities are to become "
            f"{rules.allowed(sum(part.rows for part in parts))} (packer.min_microbatches={rules.min_microbatches}, "
            f"packer.microbatch_multiple={rules.microbatch_multiple}), and no modality has {num_ranks} sequences to spare for "
            "another: lower what is asked for, or gather more sequences."
        )
    methods = " and ".join(dict.fromkeys(certificate.method for certificate in certificates))
    lower = rules.allowed(sum(certificate.lower_bound for certificate in certificates))
    rows = -(-int(cell_of_S.max() + 1) // num_ranks)
    return Certificate(num_microbatches=rows, lower_bound=lower, method=methods), cell_of_S


def problems(problem: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """For each modality its sequences and its part of a PackingProblem, with its share of proposals or of the time left."""
    left = len(problem.length_S)
    for members in kinds_of(problem.modality_S):
        ranks, given = problem.topology.data_parallel_degree, problem.start_cell_of_S
        feasible = _own_cells(problem.feasible_cell_of_S[members], ranks)
        start = None if given is None else _own_cells(given[members], ranks)
        load_SRL = problem.load_SRL[members]
        load_SRL.flags.writeable = problem.load_SRL.flags.writeable
        yield (
            members,
            replace(
                problem,
                length_S=problem.length_S[members],
                load_SRL=load_SRL,
                modality_S=None,
                num_microbatches=int((feasible if start is None else start).max()) // ranks + 1,
                feasible_cell_of_S=feasible,
                start_cell_of_S=start,
                num_proposals=-(-problem.num_proposals * len(members) // len(problem.length_S)),
                deadline=_deadline(problem.deadline, len(members) / left),
            ),
        )
        left -= len(members)


def _own_cells(cell_of_S: np.ndarray, ranks: int) -> np.ndarray:
    """Cells counted from the first microbatch of these sequences, without those that hold none of them."""
    _, row_of_S = np.unique(cell_of_S // ranks, return_inverse=True)
    return (row_of_S * ranks + cell_of_S % ranks).astype(np.int32)


def _deadline(deadline: float | None, share: float) -> float | None:
    if deadline is None:
        return None
    now = time.monotonic()
    return now + share * (deadline - now)
