"""Windows to train on: lengths and expert popularity of `windows.py`, one token in eight; or the recorded trace itself.

A batch has routes that the trainer replays, so the experts' work is the recorded demand, row by row.
"""

import importlib.util

import numpy as np
from windows import SHARED

import routepack as rp

GROUP = 8
"""Rollouts of one prompt."""
FULL_CAP, SHRINK = 16384, 8
"""`windows.py` caps sequences at 16,384 tokens; a step on two cores has room for an eighth of each."""
MAX_TOKENS = 2560
"""Of a microbatch. Three are then 84 % full: what M = ceil(tokens / cap) leaves on average."""


def synthetic(seed, num_sequences, *, layers, experts, top_k, vocab):
    """A window whose lengths (production DeepSeek-R1 outputs) and skew are those of `windows.py`."""
    if not (SHARED / "windows.py").exists():
        raise SystemExit(f"no bench windows at {SHARED}: set ROUTEPACK_SHARED to the folder that holds windows.py")
    spec = importlib.util.spec_from_file_location("shared_windows", SHARED / "windows.py")
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    shared.WINDOWS["step"] = (num_sequences, layers, experts, top_k, 2, 2, FULL_CAP, 1.0)
    tensors, _ = shared.window("step", seed)
    rng, routes = np.random.default_rng(seed), []
    for counts_LE, length in zip(tensors["tokens_SLE"].astype(np.int64), tensors["length_S"], strict=True):
        kept = rng.permutation(length)[: max(length // SHRINK, 2)]
        routes.append(np.stack([_rows(counts_E, length, rng)[kept] for counts_E in counts_LE], axis=1))
    return batch(routes, seed, experts, vocab)


def _rows(counts_E, length, rng):
    """[length, K] ids with these counts, different in every row."""
    counts_E = counts_E.copy()
    while counts_E.max() > length:
        counts_E[counts_E.argmin()] += 1
        counts_E[counts_E.argmax()] -= 1
    # An expert's rows follow one another, at most `length` of them: read column by column no row has it twice.
    ids = np.repeat(np.arange(len(counts_E)), counts_E).reshape(-1, length).T
    return ids[rng.permutation(length)]


def recorded(seed, num_sequences, *, layers, vocab, domain=None):
    """Sequences of the DeepSeek-V2-Lite trace, whole, in *layers* of its 26 MoE layers; of one domain where asked for."""
    trace = rp.load_trace(SHARED / "data/dsv2lite/routing.safetensors")
    rng = np.random.default_rng(seed)
    drawn = np.arange(trace.num_sequences) if domain is None else np.flatnonzero(trace.group_S == domain)
    drawn = rng.permutation(drawn)[:num_sequences]
    used = np.linspace(0, trace.num_layers - 1, layers).astype(int)
    return batch([trace.routed_experts_of(int(s))[:, used] for s in drawn], seed, trace.num_experts, vocab)


def part(window, which):
    """The shorter or the longer half of a window's sequences, or all."""
    by_length = np.argsort(window.num_tokens_S, kind="stable")
    half = len(by_length) // 2
    kept = {"short": by_length[:half], "long": by_length[half:], "all": by_length}[which]
    routes = [window.routed_experts_of(int(s)) for s in np.sort(kept)]
    return batch(routes, 0, window.num_experts, int(window.token_fields["token_ids"].max()) + 1)


def balanced(window):
    """The same sequences with every expert routed to alike, from token to token: what force-balanced routing would do."""
    rows, layers, top_k = window.routed_experts_TLK.shape
    ids = (np.arange(rows)[:, None] * top_k + np.arange(top_k)) % window.num_experts
    even = np.broadcast_to(ids[:, None], (rows, layers, top_k)).astype(window.routed_experts_TLK.dtype)
    return rp.RolloutBatch(
        routed_experts_TLK=even.copy(),
        cu_seqlens=window.cu_seqlens,
        num_tokens_S=window.num_tokens_S,
        num_experts=window.num_experts,
        token_fields=window.token_fields,
    )


def batch(routes, seed, experts, vocab):
    """The sequences with these routes, of random tokens, all trained."""
    lengths = np.array([len(one) for one in routes])
    tokens = np.random.default_rng(seed).integers(0, vocab, lengths.sum())
    return rp.RolloutBatch(
        routed_experts_TLK=np.concatenate(routes).astype(np.uint8),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        num_tokens_S=lengths,
        num_experts=experts,
        token_fields={"token_ids": tokens, "loss_mask": np.ones(len(tokens), dtype=bool)},
    )
