import numpy as np
import pytest

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Topology
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches import minibatches
from routepack.planning.planner import Planner
from routepack.testing import synthetic_batch


def planned(multiple=2):
    batch = synthetic_batch(num_sequences=24, max_length=60)
    packer = AttentionAwarePacker(max_tokens=96, microbatch_multiple=multiple)
    planner = Planner(topology=Topology(data_parallel_degree=2, expert_parallel_degree=2), packer=packer, num_proposals=500)
    return planner.plan(batch), batch


def with_mask(batch, mask_N):
    return RolloutBatch(
        routed_experts_TLK=batch.routed_experts_TLK,
        cu_seqlens=batch.cu_seqlens,
        num_tokens_S=batch.num_tokens_S,
        num_experts=batch.num_experts,
        token_fields={**batch.token_fields, "loss_mask": mask_N},
    )


@pytest.mark.parametrize("number", [1, 2, 4])
def test_mini_batches_share_out_all_microbatches_equally(number):
    plan, _ = planned(multiple=4)
    groups = minibatches.split(plan, number)
    assert {len(group) for group in groups} == {plan.num_microbatches // number}
    assert sorted(np.concatenate(groups)) == list(range(plan.num_microbatches))


def test_mini_batches_share_out_all_sequences():
    plan, batch = planned()
    parts = [minibatches.sequences_of(plan, group) for group in minibatches.split(plan, 2)]
    assert sorted(np.concatenate(parts)) == list(range(batch.num_sequences))


def test_trained_tokens_are_the_masks_without_first_tokens():
    plan, batch = planned()
    mask_N = np.random.default_rng(0).random(int(batch.num_tokens_S.sum())) < 0.5
    masked = with_mask(batch, mask_N)
    for group in minibatches.split(plan, 2):
        counted = sum(
            int(mask_N[masked.cu_tokens[s] + 1 : masked.cu_tokens[s + 1]].sum()) for s in minibatches.sequences_of(plan, group)
        )
        assert minibatches.trained_tokens(plan, masked, group) == counted


def test_microbatches_that_cannot_be_dealt_equally_are_refused():
    plan, _ = planned()
    with pytest.raises(ConfigError, match=r"does not divide .*microbatch_multiple=7"):
        minibatches.split(plan, 7)


def test_a_mini_batch_without_a_trained_token_is_refused():
    plan, batch = planned()
    group = minibatches.split(plan, 2)[1]
    mask_N = np.ones(int(batch.num_tokens_S.sum()), dtype=bool)
    for s in minibatches.sequences_of(plan, group):
        mask_N[batch.cu_tokens[s] : batch.cu_tokens[s + 1]] = False
    with pytest.raises(TraceError, match="train no token"):
        minibatches.trained_tokens(plan, with_mask(batch, mask_N), group)
