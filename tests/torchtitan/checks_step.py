"""What a rank measures of steps: live loads, gathering once, mini-batches, reference policies, sequences on their way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import windows
from checks import build_trainer, check, message_of, topology_of
from windows import plan_of

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import exchange_sequences
from routepack.distributed.exchange_sequences import HeldSequences
from routepack.microbatches import minibatches
from routepack.microbatches.materialize import microbatches
from routepack.torchtitan.trainer.reference_policy import ReferencePolicy
from routepack.training import expert_moves
from routepack.training.losses import CrossEntropyTokenLoss

PADDING = 16


@check
def observes(ep: int, folder: str, **changes: Any) -> dict[str, Any]:
    """The figures of a step and of its log, beside those counted from the microbatches of all ranks."""
    log = Path(folder) / f"steps{len(changes)}.jsonl"
    trainer = build_trainer(ep, pad_to_multiple_of=PADDING, step_log=str(log), **changes)
    batch, topology = fully_recorded(2), topology_of(trainer)
    plan = windows.shuffled_plan(batch, topology, 4, num_microbatches=3)
    figures = trainer.update(batch, plan, CrossEntropyTokenLoss())
    cells = [microbatches(plan, batch, w, pad_to_multiple_of=PADDING) for w in range(topology.data_parallel_degree)]
    line = json.loads(log.read_text().splitlines()[-1]) if dist.get_rank() == 0 else {}
    return {"figures": figures, **counted(cells, plan, ep), "line": line}


def fully_recorded(seed: int) -> RolloutBatch:
    batch = windows.window(seed)
    rows_S = np.diff(batch.cu_seqlens)
    return windows.with_routes(batch, batch.routed_experts_TLK, np.concatenate([[0], np.cumsum(rows_S)]))


def counted(cells: list[list[Any]], plan: Any, ep: int) -> dict[str, Any]:
    """Rows of EP ranks [M, G, R, L] as planned and unmoved, padding included; rows of experts [L, E] without it."""
    num_microbatches, groups, layers = plan.num_microbatches, len(cells) // ep, windows.NUM_LAYERS
    placed, unmoved = (np.zeros((num_microbatches, groups, ep, layers), int) for _ in range(2))
    tokens_LE = np.zeros((layers, windows.NUM_EXPERTS), int)
    rank_of_LE = plan.placement.rank_of_LE(ep)
    for w, own in enumerate(cells):
        for m, cell in enumerate(own):
            for n, routes_LK in enumerate(cell.routed_experts_nLK):
                for layer, experts in enumerate(routes_LK.tolist()):
                    for expert in experts:
                        assert expert >= 0, "every row of this window is recorded"
                        placed[m, w // ep, rank_of_LE[layer, expert], layer] += 1
                        unmoved[m, w // ep, expert * ep // windows.NUM_EXPERTS, layer] += 1
                        tokens_LE[layer, expert] += n < cell.cu_seqlens[-1]
    return {"placed": placed, "unmoved": unmoved, "tokens_LE": tokens_LE}


@check
def trains_in_mini_batches(ep: int, **changes: Any) -> dict[str, Any]:
    """Two optimizer steps on one window, by mini-batches and as two windows of their own."""
    trainer, apart = build_trainer(ep, **changes), build_trainer(ep, **changes)
    batch, topology = windows.window(6), topology_of(trainer)
    plan = windows.shuffled_plan(batch, topology, 8, num_microbatches=4)
    together = trainer.update_minibatches(batch, plan, CrossEntropyTokenLoss(), num_minibatches=2)
    alone = []
    for group in minibatches.split(plan, 2):
        sequences = minibatches.sequences_of(plan, group)
        rank = plan.topology.data_parallel_degree
        row_of_S, rank_of_S = np.divmod(plan.packing.cell_of_S[sequences], rank)
        cell_of_S = np.searchsorted(group, row_of_S) * rank + rank_of_S
        part = some_of(batch, sequences)
        alone.append(apart.update(part, plan_of(part, topology, plan.placement, cell_of_S), CrossEntropyTokenLoss()))
    states = [one.logical_state_dict() for one in (trainer, apart)]
    return {
        "together": together,
        "alone": alone,
        "unequal": [name for name, value in states[0].items() if not (value == states[1][name]).all()],
    }


def some_of(batch: RolloutBatch, sequences: np.ndarray) -> RolloutBatch:
    rows = [np.arange(*batch.cu_seqlens[s : s + 2]) for s in sequences]
    tokens = np.concatenate([np.arange(*batch.cu_tokens[s : s + 2]) for s in sequences])
    return replace(
        batch,
        routed_experts_TLK=batch.routed_experts_TLK[np.concatenate(rows)],
        cu_seqlens=np.cumsum([0, *map(len, rows)]),
        num_tokens_S=batch.num_tokens_S[sequences],
        valid_T=None if batch.valid_T is None else batch.valid_T[np.concatenate(rows)],
        token_fields={name: value[tokens] for name, value in batch.token_fields.items()},
    )


@check
def remembers(ep: int, fault: str = "", **changes: Any) -> dict[str, Any]:
    """A reference's log-probabilities before and after the trainer learnt and moved."""
    trainer = build_trainer(ep, learning_rate=0.01, **changes)
    batch, topology = windows.window(5), topology_of(trainer)
    plans = [windows.shuffled_plan(batch, topology, seed) for seed in (5, 6, 7)]
    trainer.update(batch, plans[0], CrossEntropyTokenLoss())
    expected = trainer.log_probabilities(batch, plans[0])
    reference = ReferencePolicy(trainer)
    for plan in plans[1:]:
        trainer.update(batch, plan, CrossEntropyTokenLoss())
    learnt, state = trainer.log_probabilities(batch, plans[2]), trainer.logical_state_dict()
    if fault == "reference stays":
        reference.placement = plans[2].placement
    remembered = reference.log_probabilities(batch, plans[2])
    after = trainer.logical_state_dict()
    return {
        "expected": expected,
        "learnt": learnt,
        "remembered": remembered,
        "again": reference.log_probabilities(batch, plans[0]),
        "changed": [name for name in state if not (state[name] == after[name]).all()],
        "moved": expert_moves.num_experts_moved(plans[0].placement, plans[2].placement, ep),
    }


@check
def sends_sequences(ep: int) -> dict[str, Any]:
    """Microbatches of sequences that travelled beside those cut out of the whole window; and what is refused."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = windows.window(11, num_sequences=23)
    batch = replace(batch, group_S=np.arange(23) // 3, sequence_fields={"rewards": np.arange(23, dtype=np.float32)})
    topology = windows.topology(ranks, ep)
    plan = windows.shuffled_plan(batch, topology, 3, num_microbatches=2)
    own = np.random.default_rng(0).permutation(23)[rank::ranks]
    held = HeldSequences(batch=held_part(batch, own), sequences_S=own)
    arrived = exchange_sequences.to_planned_ranks(held, plan)
    demand, whole = exchange_sequences.gathered_demand(held, RoutingDemandCollector()), RoutingDemandCollector().collect(batch)
    local = exchange_sequences.microbatches(plan, arrived, rank, pad_to_multiple_of=PADDING)
    direct = microbatches(plan, batch, rank, pad_to_multiple_of=PADDING)
    more = np.union1d(own, [int(plan.packing.sequences_of(0, 0)[0])])
    again = HeldSequences(batch=held_part(batch, more), sequences_S=more)
    twice = HeldSequences(batch=held_part(batch, np.arange(2)), sequences_S=np.arange(2))
    kinds = replace(held.batch, token_fields={**held.batch.token_fields, "extra": held.batch.token_fields["token_ids"]})
    longer = replace(plan, length_S=plan.length_S + (np.arange(23) == own[0] if rank == 0 else 0), digest="")
    refused = {
        "missing": message_of(lambda: exchange_sequences.to_planned_ranks(twice, plan)),
        "held twice": message_of(lambda: exchange_sequences.to_planned_ranks(again, plan)),
        "kinds": message_of(lambda: exchange_sequences.to_planned_ranks(replace(held, batch=kinds) if rank else held, plan)),
        "longer": message_of(lambda: exchange_sequences.to_planned_ranks(held, longer)),
        "not sent": message_of(lambda: exchange_sequences.microbatches(plan, held, rank)),
        "demand": message_of(lambda: exchange_sequences.gathered_demand(twice, RoutingDemandCollector())),
    }
    return {
        "unequal": [unequal(a, b, arrived, batch) for a, b in zip(local, direct, strict=True)],
        "sequences": arrived.sequences_S,
        "rewards": arrived.batch.sequence_fields["rewards"],
        "groups": arrived.batch.group_S,
        "demand": demand.digest == whole.digest,
        "came_from_others": len(set(arrived.sequences_S.tolist()) - set(own.tolist())),
        "refused": refused,
    }


@check
def trains_what_it_holds(ep: int) -> dict[str, Any]:
    """Steps on sequences that travelled beside steps on the whole window, with log-probabilities of both."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, held = build_trainer(ep), build_trainer(ep)
    figures, logprobs = [], []
    for step in range(3):
        batch, topology = windows.window(step), topology_of(whole)
        plan = windows.shuffled_plan(batch, topology, step, num_microbatches=2)
        own = np.random.default_rng(step).permutation(batch.num_sequences)[rank::ranks]
        sent = exchange_sequences.to_planned_ranks(HeldSequences(batch=some_of(batch, own), sequences_S=own), plan)
        of_whole, of_held = whole.log_probabilities(batch, plan), held.log_probabilities(sent, plan)
        tokens = np.concatenate([np.arange(*batch.cu_tokens[s : s + 2]) for s in sent.sequences_S])
        logprobs.append(np.array_equal(of_whole[tokens], of_held) and np.abs(of_held).max() > 0)
        names = ("loss", "grad_norm", "trained_tokens", "moe/max_vio")
        both = whole.update(batch, plan, CrossEntropyTokenLoss()), held.update(sent, plan, CrossEntropyTokenLoss())
        figures.append([[one[name] for name in names] for one in both])
    states = [one.logical_state_dict() for one in (whole, held)]
    unequal_names = [name for name, value in states[0].items() if not (value == states[1][name]).all()]
    return {"figures": figures, "logprobs": logprobs, "unequal": unequal_names}


def held_part(batch: RolloutBatch, sequences: np.ndarray) -> RolloutBatch:
    part = some_of(replace(batch, group_S=None, sequence_fields={}), sequences)
    rewards = {name: value[sequences] for name, value in batch.sequence_fields.items()}
    return replace(part, group_S=batch.group_S[sequences], sequence_fields=rewards)


def unequal(a: Any, b: Any, arrived: HeldSequences, batch: RolloutBatch) -> list[str]:
    """The arrays that differ; targets are compared by the token that they name."""
    names = ("sequences_S", "cu_seqlens", "token_ids_n", "positions_n", "targets_n", "routed_experts_nLK")
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
    pairs |= {f"fields.{name}": (a.fields[name], b.fields[name]) for name in b.fields} | {
        "has": (sorted(a.fields), sorted(b.fields))
    }
    pairs["target_index_n"] = (in_window(a.target_index_n, arrived, batch), b.target_index_n)
    return [name for name, (x, y) in pairs.items() if np.asarray(x).dtype != np.asarray(y).dtype or not np.array_equal(x, y)]


def in_window(index_n: np.ndarray, arrived: HeldSequences, batch: RolloutBatch) -> np.ndarray:
    """Places among the tokens that a rank holds as places among those of the window."""
    place = np.searchsorted(arrived.batch.cu_tokens, index_n, side="right") - 1
    there = batch.cu_tokens[arrived.sequences_S[place]] + index_n - arrived.batch.cu_tokens[place]
    return np.where(index_n < 0, index_n, there)
