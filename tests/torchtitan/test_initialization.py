"""Parameters drawn whole, in one process; test_trainer and checks.py draw them on several ranks."""

import pytest
import torch

from routepack.core.errors import ConfigError
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model
from routepack.torchtitan.trainer.initialization import draw_whole

TINY = TinyQwen3MoE(num_layers=1, num_experts=4, dim=16, moe_hidden_dim=8)


def drawn(spec, seed):
    """The model of *spec*, initialised as the trainer does it, but not sharded."""
    spec.parallelize_fn = lambda model: model
    draw_whole(spec, seed=seed)
    with torch.device("meta"):
        model = spec.parallelize_fn(spec.model.build())
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return dict(model.named_parameters())


def test_every_parameter_has_the_value_of_the_local_copy_and_random_numbers_go_on_as_before():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    found = drawn(TINY.model_spec(), seed=3)
    assert torch.equal(before, torch.get_rng_state())
    expected = dict(build_local_model(TINY, seed=3).named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
    assert not torch.equal(drawn(TINY.model_spec(), seed=4)["lm_head.weight"], expected["lm_head.weight"])


def test_a_module_that_initialises_itself_is_refused_by_name():
    spec = TINY.model_spec()
    spec.model.lm_head.param_init = None
    with pytest.raises(ConfigError, match=r"model qwen3 moe_1x4 has no param_init for lm_head.weight: it cannot"):
        drawn(spec, seed=3)
