"""One gloo rank of test_gathering.py: counts its share of a window and writes what it gets."""

import pickle
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import RoutePackError
from routepack.core.rollouts import RolloutBatch
from routepack.distributed import collectives, gather_demand
from routepack.testing import synthetic_batch


def share_of(batch, sequences):
    """The sequences of a batch, in that order."""
    rows = [np.arange(batch.cu_seqlens[s], batch.cu_seqlens[s + 1]) for s in sequences]
    keep = np.concatenate(rows)
    return RolloutBatch(
        routed_experts_TLK=batch.routed_experts_TLK[keep],
        cu_seqlens=np.concatenate([[0], np.cumsum([len(r) for r in rows])]),
        num_tokens_S=batch.num_tokens_S[sequences],
        num_experts=batch.num_experts,
        layer_ids_L=batch.layer_ids_L,
        valid_T=None if batch.valid_T is None else batch.valid_T[keep],
        group_S=None if batch.group_S is None else batch.group_S[sequences],
        modality_S=None if batch.modality_S is None else batch.modality_S[sequences],
    )


def window(seed=0):
    """A window in which some sequences lost most of their rows."""
    batch = synthetic_batch(num_sequences=23, num_layers=3, num_experts=16, top_k=2, max_length=64, seed=seed)
    lost = np.isin(np.repeat(np.arange(23), np.diff(batch.cu_seqlens)), [3, 11, 22])
    return replace(
        batch, modality_S=np.arange(23) % 2, layer_ids_L=[1, 2, 5], valid_T=~lost, token_fields={}, sequence_fields={}
    )


def cases(rank, ranks):
    """Name, batch of this rank, positions."""
    batch, mine = window(), np.arange(rank, 23, ranks)
    yield "interleaved", share_of(batch, mine), mine
    yield "in rank order", share_of(batch, np.array_split(np.arange(23), ranks)[rank]), None
    others = np.array_split(np.arange(23), ranks - 1)
    yield "an idle rank", None if rank == 0 else share_of(batch, others[rank - 1]), None
    bad = share_of(batch, mine)
    if rank == 1:
        ids = bad.routed_experts_TLK.copy()
        ids[0, 0, 0] = 200
        bad = replace(bad, routed_experts_TLK=ids)
    yield "a bad id on one rank", bad, None
    other = synthetic_batch(num_sequences=4, num_layers=3 + (rank == 1), num_experts=16, max_length=32)
    yield "another model on one rank", other, None
    yield "the same place twice", share_of(batch, mine), np.zeros(len(mine), np.int64)
    yield "after the errors", share_of(batch, mine), mine


def main():
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    results, sent = {}, []
    plain = collectives.from_all

    def counted(share, what):
        """What leaves this rank: the arrays' bytes, and all that is pickled."""
        parts = [] if share.demand is None else [*vars(share.demand).values(), share.coverage_S, share.positions_S]
        sent.append((sum(part.nbytes for part in parts if isinstance(part, np.ndarray)), len(pickle.dumps(share))))
        return plain(share, what)

    gather_demand.from_all = counted
    for name, batch, positions in cases(rank, ranks):
        sent.clear()
        try:
            demand = gather_demand.collect_demand(RoutingDemandCollector(), batch, positions_S=positions)
            results[name] = {
                "digest": demand.digest, "layers": demand.layer_ids_L.tolist(), "groups": demand.group_S.tolist(),
                "estimated": demand.estimated_S.tolist(), "masked": demand.num_masked_rows, "sent": list(sent),
            }  # fmt: skip
        except RoutePackError as error:
            results[name] = f"{type(error).__name__}: {error}"
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    collectives.leave()


if __name__ == "__main__":
    main()
