"""slime and miles: ``build_dp_schedule``, of both, planned. Imports neither. Letters: :mod:`routepack.core`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routepack.core.errors import ConfigError, InfeasibleError
from routepack.integrations.schedule import Hook, setting

DpSchedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


@dataclass(kw_only=True, eq=False)
class SlimeHook(Hook):
    """Stands in for ``slime.utils.dp_schedule.build_dp_schedule`` or that of miles.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=8)
    >>> config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    >>> partitions, microbatches, counts, rollouts = SlimeHook()(
    ...     args, config, [5, 3, 4, 4], global_batch_size=4, rollout_indices=[0, 1, 2, 3])
    >>> sorted(len(one) for one in partitions), counts, rollouts
    ([2, 2], [1], [4])
    """

    def __call__(
        self,
        args: Any,
        train_parallel_config: Mapping[str, Any],
        total_lengths: Sequence[int],
        *,
        global_batch_size: int,
        rollout_indices: Sequence[int],
    ) -> DpSchedule:
        """As the stacks' own: per-rank sample numbers, per-rank microbatches of places in those, M and rollouts of each step.

        A step is ``global_batch_size`` rollouts with all their samples; what is left over is dropped, or under miles'
        ``allow_partial_train_step`` a step of its own. No microbatch is above ``max_tokens_per_gpu`` x CP.

        Raises ConfigError without dynamic batch size, InfeasibleError for a sample above the cap (the stacks let it pass,
        alone) and for fewer samples than cells.
        """
        if not setting(args, "use_dynamic_batch_size"):
            raise ConfigError(
                "use_dynamic_batch_size is off: RoutePack packs by tokens. Pass --use-dynamic-batch-size and "
                "--max-tokens-per-gpu, or leave the hook off."
            )
        self._begin(len(total_lengths))
        ranks = train_parallel_config["dp_size"]
        interleaved = (train_parallel_config["vpp_size"] or 1) > 1
        asked = {
            "data_parallel_degree": ranks,
            "max_tokens": setting(args, "max_tokens_per_gpu") * train_parallel_config["cp_size"],
            "microbatch_multiple": train_parallel_config["microbatch_group_size_per_vp_stage"] if interleaved else 1,
        }
        partitions: list[list[int]] = [[] for _ in range(ranks)]
        microbatches: list[list[list[int]]] = [[] for _ in range(ranks)]
        steps = _steps(rollout_indices, global_batch_size, ranks, partial=bool(setting(args, "allow_partial_train_step")))
        for samples, _ in steps:
            lengths = [int(total_lengths[s]) for s in samples]
            groups = [int(rollout_indices[s]) for s in samples]
            planned = self._schedule(lengths, of=samples, group_ids=groups, **asked)
            for rank in range(ranks):
                for cell in planned.rank(rank):
                    start = len(partitions[rank])
                    partitions[rank] += [samples[s] for s in cell]
                    microbatches[rank].append(list(range(start, start + len(cell))))
        return partitions, microbatches, [planned.num_microbatches for planned in self.schedules], [n for _, n in steps]


def _steps(rollout_indices: Sequence[int], per_step: int, ranks: int, *, partial: bool) -> list[tuple[list[int], int]]:
    """Each step's samples, rollouts in order of first appearance, and its number of rollouts."""
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of.values())
    if per_step < 1 or len(rollouts) < per_step:
        raise InfeasibleError(f"global_batch_size={per_step} rollouts make a step; there are {len(rollouts)}: gather more.")
    steps = [rollouts[first : first + per_step] for first in range(0, len(rollouts), per_step)]
    if len(steps[-1]) < per_step and not (partial and sum(map(len, steps[-1])) >= ranks):
        steps.pop()
    return [([sample for rollout in step for sample in rollout], len(step)) for step in steps]
