"""Weights that transformers wrote, in the trainer: the same log-probabilities as transformers' own."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from routepack.torchtitan.model.models import RegisteredModel, TinyQwen3MoE

SEQUENCES = [list(range(1, 40, 2)), [5, 3, 60, 2, 2, 17], list(range(63, 20, -1))]


def qwen(transformers):
    """As TinyQwen3MoE."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, max_position_embeddings=512, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), TinyQwen3MoE()


def deepseek(transformers):
    """As TorchTitan's debugmodel: latent attention, YaRN, a dense layer, shared experts."""
    config = transformers.DeepseekV2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=3,
        first_k_dense_replace=1, norm_topk_prob=False, routed_scaling_factor=1.0, topk_method="greedy", q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-5,
        max_position_embeddings=16_384, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7,
            "mscale_all_dim": 0.7, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(config), RegisteredModel(name="deepseek_v3", flavor="debugmodel")


@pytest.mark.slow
@pytest.mark.parametrize("family", [qwen, deepseek])
def test_log_probabilities_are_those_of_transformers(family, launch_ranks, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs, ours = family(transformers)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.08 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
        wanted = [logprobs_of(theirs, tokens) for tokens in SEQUENCES]
    theirs.save_pretrained(tmp_path / "weights")
    arguments = {"folder": str(tmp_path / "weights"), "model": ours, "tokens": SEQUENCES}
    (result,) = launch_ranks([("logprobs", "logprobs_from_huggingface", arguments)], 1, tmp_path / "launch")
    assert np.abs(np.concatenate(wanted)).max() > 5.0
    np.testing.assert_allclose(result["logprobs"], np.concatenate(wanted), atol=2e-4)


def logprobs_of(model, tokens):
    ids = torch.tensor([tokens])
    logits = model(input_ids=ids).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


LAYOUTS = {
    "EP blocks cut again": {"ep": 2},
    "replicated": {"ep": 2, "data_parallel_replicate_degree": 2},
    "inside experts": {"ep": 2, "tiny": {"num_experts": 2, "top_k": 1}},
    "inside experts, without EP": {"ep": 1, "tiny": {"num_experts": 3}},
}


@pytest.mark.slow
def test_four_ranks_read_what_they_wrote_in_every_layout_of_experts(launch_ranks, tmp_path):
    checks = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        folder = str(tmp_path / f"exported{number}")
        checks.append((f"{name} out", "exports", {"folder": folder, "seed": None, **layout}))
        seed = 5 if "tiny" not in layout else None
        checks.append((name, "loads_huggingface", {"folder": folder, "seed": seed, **layout}))
        checks.append((f"{name} memory", "takes_memory", layout))
    results = launch_ranks(checks, 4, tmp_path / "launch")
    for number, name in enumerate(LAYOUTS):
        state = results[0][name]["state"]
        exported = load_file(tmp_path / f"exported{number}" / "model-00001-of-00001.safetensors")
        for expert, ours in enumerate(state["layers.1.moe.routed_experts.inner_experts.w2_EDF"]):
            assert np.array_equal(ours, exported[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]), name
        for result in results[1:]:
            assert all(np.array_equal(result[name]["state"][one], state[one]) for one in state), name
        assert not np.array_equal(results[0][name]["before"]["lm_head.weight"], state["lm_head.weight"])
        measured = [result[f"{name} memory"] for result in results]
        for part in ("weights", "optimizer"):
            assert getattr(measured[0]["estimate"], part) == max(one[part] for one in measured), (name, part)
