"""Experts that the same sequences use onto the same node. Letters: :mod:`routepack.core`; n nodes of a group."""

from __future__ import annotations

import numpy as np
from numba import njit


def gathered_nodes(tokens_SLE: np.ndarray, num_nodes: int, *, sample: int = 512, rounds: int = 6) -> np.ndarray:
    """int32 [L, E]: a node for every expert, E / N a node in every layer, so that sequences find theirs together.

    The longest sequences, whose routes say most, are dealt to nodes around those that route least alike; then experts go
    where they are used most, and sequences where they use most, in turn. Balance is not looked at.
    """
    chosen = np.argsort(-tokens_SLE[:, 0].sum(axis=1, dtype=np.int64), kind="stable")[:sample]
    rows_SLE = tokens_SLE[chosen].astype(np.float64)
    share_SLE = rows_SLE / np.maximum(1.0, rows_SLE[:, :1].sum(axis=2, keepdims=True))
    share_SLE -= share_SLE.mean(axis=0)
    node_of_S = _dealt(_likeness(share_SLE, _unlike(share_SLE, num_nodes)))
    node_of_LE = _used_by(share_SLE, node_of_S, num_nodes)
    for _ in range(rounds):
        before, node_of_S = node_of_S, _dealt(_node_shares(share_SLE, node_of_LE, num_nodes))
        if (before == node_of_S).all():
            break
        node_of_LE = _used_by(share_SLE, node_of_S, num_nodes)
    return node_of_LE


def _used_by(share_SLE: np.ndarray, node_of_S: np.ndarray, num_nodes: int) -> np.ndarray:
    """int32 [L, E]: every expert on the node whose sequences use it most, equal counts a node."""
    used_LEn = np.stack([share_SLE[node_of_S == n].sum(axis=0) for n in range(num_nodes)], axis=-1)
    return np.stack([_dealt(used_En) for used_En in used_LEn]).astype(np.int32)


def _unlike(share_SLE: np.ndarray, count: int) -> list[int]:
    """The sequence farthest from the mean route, and so many more, each farthest from those before it."""
    nearest_S = (share_SLE**2).sum(axis=(1, 2))
    found = [int(nearest_S.argmax())]
    nearest_S = np.full(len(share_SLE), np.inf)
    while len(found) < count:
        nearest_S = np.minimum(nearest_S, ((share_SLE - share_SLE[found[-1]]) ** 2).sum(axis=(1, 2)))
        found.append(int(nearest_S.argmax()))
    return found


def _likeness(share_SLE: np.ndarray, centres: list[int]) -> np.ndarray:
    return -np.stack([((share_SLE - share_SLE[centre]) ** 2).sum(axis=(1, 2)) for centre in centres], axis=1)


def _node_shares(share_SLE: np.ndarray, node_of_LE: np.ndarray, num_nodes: int) -> np.ndarray:
    return np.stack([(share_SLE * (node_of_LE == n)).sum(axis=(1, 2)) for n in range(num_nodes)], axis=1)


def _dealt(wish_In: np.ndarray) -> np.ndarray:
    """int64 [I]: a node for every item, as many items on each as can be, the strongest preferences first."""
    items, nodes = wish_In.shape
    advantage_In = wish_In - wish_In.mean(axis=1, keepdims=True)
    order = np.argsort(-advantage_In, axis=None, kind="stable")
    node_of_I = np.full(items, -1, dtype=np.int64)
    _deal(order, node_of_I, nodes, -(-items // nodes))
    return node_of_I


@njit(nogil=True, cache=True)
def _deal(order, node_of_I, nodes, room):
    count_n = np.zeros(nodes, np.int64)
    for place in order:
        item, node = place // nodes, place % nodes
        if node_of_I[item] < 0 and count_n[node] < room:
            node_of_I[item] = node
            count_n[node] += 1
