"""Each stack's form of a window, built by hand from plain arrays, so that it may hold what an exporter would refuse."""

from dataclasses import dataclass, field

import numpy as np

from routepack.traces.formats import ModelRouting
from routepack.traces.formats.payloads import encoded, envelope

NAMES = [
    "vllm", "sglang", "verl-padded", "verl-jagged", "verl-veomni", "slime", "miles", "nemo-rl-padded", "nemo-rl-envelope",
    "prime-rl", "verifiers-nodes", "areal", "skyrl-padded", "skyrl-records", "megatron", "arrays-npz", "arrays-jsonl",
]  # fmt: skip
STACKS = ("nemo-rl", "prime-rl", "vllm", "sglang", "verl", "slime", "miles", "areal", "skyrl", "megatron", "arrays")
STACK_OF = {"verifiers-nodes": "verifiers"} | {
    name: next(stack for stack in STACKS if name.startswith(stack)) for name in NAMES if name != "verifiers-nodes"
}  # fmt: skip
PADDED = ("verl-padded", "nemo-rl-padded", "skyrl-padded")
TENSORS = (*PADDED, "verl-jagged", "verl-veomni", "arrays-npz")
RECORDS = tuple(name for name in NAMES if name not in TENSORS)
BASE64 = ("sglang", "nemo-rl-envelope", "prime-rl")
PROMPT = 6


@dataclass
class Window:
    """Rows as delivered, one array a sequence (or None), and how many tokens each has."""

    ids: list
    tokens: list
    num_experts: int = 32
    dtype: type = np.int32
    turns: list | None = None
    """For each sequence, turns as (start, ids, tokens at the turn's end)."""
    model: dict = field(default_factory=dict)

    def routing(self):
        first = next((ids for ids in self.ids if ids is not None), np.zeros((0, 4, 2)))
        shape = {"num_experts": self.num_experts, "top_k": first.shape[2], "num_layers": first.shape[1]}
        return ModelRouting(**(shape | self.model))


def build(name, window):
    """The source in that form, and the options that its ``load`` takes."""
    ids = [None if one is None else np.asarray(one).astype(window.dtype) for one in window.ids]
    maker = globals()[f"_{name.replace('-', '_')}"]
    return maker(ids, window.tokens, window), {"veomni": True} if name == "verl-veomni" else {}


def filler(top_k, layers):
    return np.broadcast_to(np.arange(top_k), (layers, top_k))


def _shape(window):
    return next(ids.shape[1:] for ids in window.ids if ids is not None) if any(i is not None for i in window.ids) else (4, 2)


def _vllm(ids, tokens, window):
    if window.turns:
        return [
            {"num_tokens": n, "deltas": [{"routed_experts": part, "start": start} for start, part, _ in turns]}
            for n, turns in zip(tokens, window.turns, strict=True)
        ]
    return [{"token_ids": np.arange(n), "routed_experts": one} for n, one in zip(tokens, ids, strict=True)]


def _sglang(ids, tokens, window):
    def response(n, one, start=0):
        meta = {"prompt_tokens": min(PROMPT, n), "completion_tokens": n - min(PROMPT, n)}
        extra = {"routed_experts_start_len": start} if start else {}
        if one is not None:
            is_named = one.dtype.kind == "u"
            meta |= {"routed_experts": encoded(one if is_named else one.astype(np.int32))}
            extra |= {"routed_experts_dtype": one.dtype.name} if is_named else {}
        return {"meta_info": meta | extra}

    if window.turns:
        return [{"turns": [response(n, part, start) for start, part, n in turns]} for turns in window.turns]
    return [response(n, one) for n, one in zip(tokens, ids, strict=True)]


def _padded(ids, tokens, window, fill, left):
    width, dtype = max(tokens) + 2, window.dtype
    padded = np.zeros((len(tokens), width, *_shape(window)), dtype)
    mask = np.zeros((len(tokens), width), bool)
    padded[:] = fill
    for s, (n, one) in enumerate(zip(tokens, ids, strict=True)):
        begin = width - 1 - n if left else 0
        mask[s, begin : begin + n] = True
        if one is not None:
            padded[s, begin : begin + len(one)] = one
    return padded, mask


def _verl_padded(ids, tokens, window):
    padded, mask = _padded(ids, tokens, window, 0, left=True)
    return {"routed_experts": padded, "attention_mask": mask}


def _verl_jagged(ids, tokens, window):
    whole = [np.zeros((n, *_shape(window)), window.dtype) if one is None else one for n, one in zip(tokens, ids, strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in whole])])
    return {"routed_experts": {"values": np.concatenate(whole), "offsets": offsets}, "num_tokens": np.asarray(tokens)}


_verl_veomni = _verl_jagged


def _slime(ids, tokens, window):
    if window.turns:
        return [
            {"tokens": np.arange(n), "turns": [{"routed_experts": p, "routed_experts_start_len": s} for s, p, _ in turns]}
            for n, turns in zip(tokens, window.turns, strict=True)
        ]  # fmt: skip
    return [{"tokens": np.arange(n), "rollout_routed_experts": one} for n, one in zip(tokens, ids, strict=True)]


_miles = _slime


def _nemo_rl_padded(ids, tokens, window):
    padded, _ = _padded([None] * len(ids), tokens, window, np.arange(_shape(window)[1]), left=False)
    for s, (n, one) in enumerate(zip(tokens, ids, strict=True)):
        padded[s, : n - 1] = -1
        if one is not None:
            padded[s, : min(len(one), n - 1)] = one[: n - 1]
    return {"routed_experts": padded, "input_lengths": np.asarray(tokens)}


def _nemo_rl_envelope(ids, tokens, window):
    def message(n, one, start=0):
        routes = None
        if one is not None:
            ends = start + len(one) == n - 1
            wide = np.asarray(one).astype(window.dtype)
            routes = envelope(
                np.concatenate([wide, filler(one.shape[2], one.shape[1])[None].astype(window.dtype)]) if ends else wide
            )
        prompt = np.arange(min(PROMPT, n))
        return {
            "prompt_token_ids": prompt,
            "generation_token_ids": np.arange(n - len(prompt)),
            "routed_experts": routes,
            "start": start,
        }

    if window.turns:
        return [{"turns": [message(n, part, start) for start, part, n in turns]} for turns in window.turns]
    return [message(n, one) for n, one in zip(tokens, ids, strict=True)]


def _payload(one, start=0):
    return {"data": encoded(one), "shape": list(one.shape), "dtype": one.dtype.name, "start": start}


def _prime_rl(ids, tokens, window):
    if window.turns:
        return [
            {"num_tokens": n, "turns": [_payload(np.asarray(part).astype(window.dtype), start) for start, part, _ in turns]}
            for n, turns in zip(tokens, window.turns, strict=True)
        ]
    payloads = [None if one is None else _payload(one) for one in ids]
    return [{"token_ids": np.arange(n), "routed_experts": payload} for n, payload in zip(tokens, payloads, strict=True)]


def _verifiers_nodes(ids, tokens, window):
    branches = []
    for n, one in zip(tokens, ids, strict=True):
        cut = min(PROMPT, n)
        parts = [None, None] if one is None else [one[:cut], one[cut:]]
        nodes = [
            {"token_ids": np.arange(cut), "routed_experts": parts[0], "sampled": False},
            {"token_ids": np.arange(n - cut), "routed_experts": parts[1], "sampled": True},
        ]
        branches.append({"nodes": nodes})
    return branches


def _areal(ids, tokens, window):
    if window.turns:
        ids = [np.concatenate([part for _, part, _ in turns]) for turns in window.turns]
    versions = [np.zeros(n - min(PROMPT, n), int) for n in tokens]
    for s, turns in enumerate(window.turns or []):
        for _, _, end in turns[:-1]:
            versions[s][end - PROMPT :] += 1
    return [
        {"input_tokens": np.arange(min(PROMPT, n)), "output_tokens": np.arange(n - min(PROMPT, n)), "output_versions": version,
         "routed_experts": None if one is None else one.reshape(len(one), one.shape[1] * one.shape[2])}
        for n, one, version in zip(tokens, ids, versions, strict=True)
    ]  # fmt: skip


def _skyrl_padded(ids, tokens, window):
    top_k = _shape(window)[1]
    padded, mask = _padded(ids, tokens, window, np.arange(top_k), left=True)
    padding = ~mask
    for s, (n, one) in enumerate(zip(tokens, ids, strict=True)):
        begin = mask.shape[1] - 1 - n
        padding[s, begin + (0 if one is None else len(one)) : begin + n] = True
    return {"rollout_expert_indices": padded, "attention_mask": mask, "router_padding_mask": padding}


def _skyrl_records(ids, tokens, window):
    return [
        {"prompt_ids": np.arange(min(PROMPT, n)), "response_ids": np.arange(n - min(PROMPT, n)), "rollout_expert_indices": one}
        for n, one in zip(tokens, ids, strict=True)
    ]


def _megatron(ids, tokens, window):
    return [
        {"step": s, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0, "num_tokens": len(one),
         "topk": one.shape[2], "top_indices": one[:, layer].tolist()}
        for s, one in enumerate(ids) for layer in range(one.shape[1])
    ]  # fmt: skip


def _arrays_npz(ids, tokens, window):
    present = [np.zeros((0, *_shape(window)), window.dtype) if one is None else one for one in ids]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in present])])
    return {"routed_experts": np.concatenate(present), "cu_seqlens": offsets, "num_tokens": np.asarray(tokens)}


def _arrays_jsonl(ids, tokens, window):
    return [
        {"num_tokens": n, "routed_experts": None if one is None else one.tolist()} for n, one in zip(tokens, ids, strict=True)
    ]
