"""Dimensions of published models and speeds of devices, for a cost model of FLOPs. D model dim, F hidden dim of an expert."""

from __future__ import annotations

from typing import Any

DEVICE_PEAK_FLOPS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}
"""Dense bf16 FLOP/s of the SXM parts, from NVIDIA's data sheets (half of the figures quoted with sparsity)."""


def _grouped_query(dim: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    params = dim * head_dim * (2 * heads + 2 * kv_heads)
    return {"dim": dim, "num_heads": heads, "qk_head_dim": head_dim, "v_head_dim": head_dim, "attention_params": params}


def _latent(dim: int, heads: int, *, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, Any]:
    params = dim * heads * (nope + rope) + dim * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * dim
    return {"dim": dim, "num_heads": heads, "qk_head_dim": nope + rope, "v_head_dim": value, "attention_params": params}


MODELS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-30B-A3B config.json: 48 MoE layers of 128 experts, no shared expert, vocabulary 151,936.
    "qwen3_30b_a3b": _grouped_query(2048, 32, 4, 128)
    | {"moe_hidden_dim": 768, "num_full_layers": 48, "dense_params_per_token": 48 * 2048 * 128 + 2048 * 151_936},
    # deepseek-ai/DeepSeek-V2-Lite config.json: 27 layers, the first dense (10,944), two shared experts (1,408 each), no q_lora.
    "deepseek_v2_lite": _latent(2048, 16, kv_rank=512, nope=128, rope=64, value=128)
    | {
        "moe_hidden_dim": 1408,
        "num_full_layers": 27,
        "dense_params_per_token": 3 * 2048 * (10_944 + 26 * 2 * 1408) + 26 * 2048 * 64 + 2048 * 102_400,
    },
    # openai/gpt-oss-20b config.json: 24 layers, every other one sliding over 128 tokens, 32 experts, vocabulary 201,088.
    "gpt_oss_20b": _grouped_query(2880, 64, 8, 64)
    | {
        "moe_hidden_dim": 2880,
        "num_full_layers": 12,
        "num_sliding_layers": 12,
        "sliding_window": 128,
        "dense_params_per_token": 24 * 2880 * 32 + 2880 * 201_088,
    },
}
"""Dimensions from the models' published configurations."""
