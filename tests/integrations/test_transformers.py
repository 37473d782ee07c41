"""The experts in real, small models of Hugging Face transformers, against transformers' own eager experts."""

import copy

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'routepack[transformers]'"
)

from routepack.core.errors import ConfigError  # noqa: E402
from routepack.integrations import transformers as integration  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def model_of(config_class, **changes):
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def loss_and_gradients(model, implementation):
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "MixtralConfig"])
def test_loss_and_gradients_are_those_of_the_eager_experts(name):
    model = model_of(getattr(transformers, name), num_local_experts=8)
    loss, gradients = loss_and_gradients(model, integration.NAME)
    expected_loss, expected = loss_and_gradients(model, "eager")
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for parameter in gradients:
        torch.testing.assert_close(gradients[parameter], expected[parameter], rtol=1e-4, atol=1e-6)


def test_the_registered_function_is_what_runs(monkeypatch):
    model, calls = model_of(transformers.Qwen3MoeConfig), []
    monkeypatch.setattr(integration, "moe_experts", lambda x, *rest: calls.append(x.shape) or torch.zeros_like(x))
    loss_and_gradients(model, integration.NAME)
    assert calls == [(26, SMALL["hidden_size"])] * SMALL["num_hidden_layers"]


def experts(*, concatenated, transposed):
    """An experts class of each layout that transformers has, by its own decorator."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation(is_concatenated=concatenated, is_transposed=transposed)
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            E, F, D = 4, 24, 32
            gate_up, down = ((E, D, 2 * F), (E, F, D)) if transposed else ((E, 2 * F, D), (E, D, F))
            self.gate_up_proj = torch.nn.Parameter(torch.randn(gate_up))
            self.down_proj = torch.nn.Parameter(torch.randn(down))
            self.num_experts, self.act_fn = E, ACT2FN["silu"]

        def forward(self, x, ids, scores):
            out = torch.zeros_like(x)
            for expert in range(self.num_experts):
                token, choice = (ids == expert).nonzero(as_tuple=True)
                gate_up, down = self.gate_up_proj[expert], self.down_proj[expert]
                gate_up, down = (gate_up, down) if transposed else (gate_up.T, down.T)
                both = x[token] @ gate_up
                gate, up = both.chunk(2, -1) if concatenated else (both[:, ::2], both[:, 1::2])
                out = out.index_add(0, token, (self.act_fn(gate) * up) @ down * scores[token, choice, None])
            return out

    config = transformers.Qwen3MoeConfig(**SMALL)
    config._experts_implementation = integration.NAME
    return Experts(config)


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_layout_is_read_in_place(concatenated, transposed):
    torch.manual_seed(0)
    layer = experts(concatenated=concatenated, transposed=transposed)
    x, ids, scores = torch.randn(9, 32), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    results = []
    for implementation in (integration.NAME, "eager"):
        layer.zero_grad()
        layer.config._experts_implementation = implementation
        out = layer(x, ids, scores)
        out.square().mean().backward()
        results.append([out.detach(), layer.gate_up_proj.grad, layer.down_proj.grad])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    views = integration.weight_views(layer)
    assert {view.untyped_storage().data_ptr() for view in views[:2]} == {layer.gate_up_proj.untyped_storage().data_ptr()}


def test_an_interleaved_weight_read_as_concatenated_would_show():
    torch.manual_seed(0)
    layer = experts(concatenated=False, transposed=False)
    x, ids, scores = torch.randn(9, 32), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    right = layer(x, ids, scores)
    layer.is_concatenated = True
    assert (layer(x, ids, scores) - right).abs().max() > 1.0


def test_rows_of_other_ranks_add_nothing():
    layer = experts(concatenated=True, transposed=False)
    x, scores = torch.randn(5, 32), torch.rand(5, 2)
    out = layer(x, torch.tensor([[0, 4], [1, 4], [2, 4], [3, 4], [4, 4]]), scores)
    expected = layer(x[:4], torch.tensor([[0], [1], [2], [3]]), scores[:4, :1])
    torch.testing.assert_close(out, torch.cat([expected, torch.zeros(1, 32)]))


def test_what_is_not_swiglu_is_refused_by_name():
    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=24, num_local_experts=4, vocab_size=64, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, layer_types=["full_attention"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=integration.NAME)
    with pytest.raises(ConfigError, match="GptOssExperts has biases and has a gating of its own"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))
