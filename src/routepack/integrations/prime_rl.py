"""prime-rl: ``prepare_batch``, planned from the routes that its samples carry. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from routepack.core.errors import TraceError
from routepack.integrations.schedule import DUMMY, Hook, Schedule
from routepack.traces.formats.model_routing import ModelRouting
from routepack.traces.formats.stacks.prime_rl import load

MicroBatch = TypeVar("MicroBatch")


@dataclass(kw_only=True, eq=False)
class PrimeHook(Hook, Generic[MicroBatch]):
    """Stands in for ``prime_rl.trainer.batch.prepare_batch``; what a microbatch is stays prime-rl's.

    Samples with images, those of each form of image tensors, and (where only some have them) those with routes are packed
    apart; at each step all ranks have the same kind. A rank that no sample is left for gets a dummy, as in prime-rl.

    >>> from types import SimpleNamespace
    >>> samples = [SimpleNamespace(token_ids=[0] * n, routed_experts=None, mm_kwargs=None) for n in (5, 3, 4)]
    >>> hook = PrimeHook(materialize=lambda samples, _: [len(one.token_ids) for one in samples], make_dummy=lambda _: "none")
    >>> hook.prepare_batch(samples, seq_len=8, num_train_workers=4)
    [[[5]], [[4]], [[3]], ['none']]
    """

    materialize: Callable[[list[Any], int], MicroBatch]
    """The microbatch of these samples, padded to a multiple of the second argument; cuts samples to ``seq_len`` as it does."""
    make_dummy: Callable[[MicroBatch], MicroBatch]
    """A microbatch of that kind which trains on nothing; never to change the one it is given."""
    model: ModelRouting | None = None
    """How the model routes: then the samples' own routes are counted. None: what was given to ``expect``, or lengths."""

    def prepare_batch(
        self,
        rollouts: Sequence[Any],
        seq_len: int,
        num_train_workers: int,
        bin_cost: Any = None,
        pad_to_multiple_of: int = 1,
    ) -> list[list[MicroBatch]]:
        """Each worker's microbatches, equally many. *bin_cost* is not asked: the planner has a cost model.

        Raises TraceError for no rollouts at all, or routes that are none.
        """
        if not rollouts:
            raise TraceError("rollouts is empty: there is nothing to train on.")
        if self.model is not None and any(sample.routed_experts is not None for sample in rollouts):
            records = [_record(sample, seq_len) for sample in rollouts]
            self.expect(load(records, self.model).batch)
        self._begin(len(rollouts))
        kind_of = _kinds(rollouts)
        planned = self._schedule(
            [min(len(sample.token_ids), seq_len) for sample in rollouts],
            data_parallel_degree=num_train_workers,
            max_tokens=seq_len,
            modalities=kind_of if len(set(kind_of)) > 1 else None,
            dummies=True,
        )
        return [self._microbatches(planned, rank, rollouts, pad_to_multiple_of) for rank in range(num_train_workers)]

    def _microbatches(self, planned: Schedule, rank: int, rollouts: Sequence[Any], multiple: int) -> list[MicroBatch]:
        made = []
        for microbatch, cell in enumerate(planned.rank(rank)):
            if cell != [DUMMY]:
                made.append(self.materialize([rollouts[s] for s in cell], multiple))
                continue
            # Some rank has a sample at this step, for dummies are fewer than ranks; its kind is the step's.
            there = [s for other in range(planned.data_parallel_degree) for s in planned.cell(microbatch, other) if s != DUMMY]
            shortest = min(there, key=lambda s: len(rollouts[s].token_ids))
            made.append(self.make_dummy(self.materialize([rollouts[shortest]], multiple)))
        return made


def _kinds(rollouts: Sequence[Any]) -> list[int]:
    """Numbers for what must not share a microbatch."""
    forms = [(_images(sample.mm_kwargs), sample.routed_experts is None) for sample in rollouts]
    number_of = {form: number for number, form in enumerate(dict.fromkeys(forms))}
    return [number_of[form] for form in forms]


def _images(tensors: Any) -> Any:
    if tensors is None:
        return None
    return tuple(sorted((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()))


def _record(sample: Any, seq_len: int) -> dict[str, Any]:
    """What the importer reads, cut as prime-rl cuts: routes together with tokens."""
    record: dict[str, Any] = {"token_ids": np.asarray(sample.token_ids[:seq_len])}
    routes = sample.routed_experts
    if routes is not None:
        rows, *row = routes.shape
        row_bytes = int(np.prod(row)) * np.dtype(routes.dtype).itemsize
        data, kept = routes.data, min(rows, seq_len)
        record["routed_experts"] = {"data": data[: kept * row_bytes], "shape": [kept, *row], "dtype": routes.dtype}
    return record
