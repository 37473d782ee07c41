"""Live collection on a Hugging Face MoE, where transformers is installed."""

import numpy as np
import pytest
import torch

from routepack.integrations.live import LiveRoutes

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_routes_of_a_qwen3_moe_are_the_largest_of_its_router_logits():
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    tokens, width, lengths = torch.randint(0, 64, (2, 6)), 6, [6, 4]
    with torch.no_grad(), LiveRoutes(model, "model.layers.*.mlp.gate", num_experts=8, top_k=2) as live:
        with live.microbatch(lengths, starts=[0, width]):
            logits = model(tokens, output_router_logits=True).router_logits
        batch = live.batch(num_tokens_S=lengths)
    assert batch.layer_ids_L.tolist() == [1, 2]
    for layer, of_layer in enumerate(logits):
        largest = np.sort(np.argsort(-of_layer.float().numpy())[:, :2].reshape(2, width, 2))
        for sequence, length in enumerate(lengths):
            found = np.sort(batch.routed_experts_of(sequence)[:, layer])
            np.testing.assert_array_equal(found, largest[sequence, :length])
