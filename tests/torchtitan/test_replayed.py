import numpy as np
import pytest
import torch

from routepack.core.errors import TraceError
from routepack.core.rollouts import RolloutBatch
from routepack.microbatches.materialize import Microbatch
from routepack.torchtitan.trainer.microbatch_tensors import ReplayedMicrobatch, num_trained_tokens


def microbatch(**fields):
    count = len(fields["loss_mask"])
    return Microbatch(
        sequences_S=np.array([0]),
        cu_seqlens=np.array([0, count]),
        token_ids_n=np.arange(count),
        positions_n=np.arange(count),
        targets_n=np.arange(count),
        target_index_n=np.arange(count),
        routed_experts_nLK=np.zeros((count, 1, 1), np.int16),
        fields=fields,
    )


def batch(loss_mask, num_tokens):
    return RolloutBatch(
        routed_experts_TLK=np.zeros((0, 1, 1), np.uint8),
        cu_seqlens=[0] * (len(num_tokens) + 1),
        num_tokens_S=num_tokens,
        num_experts=2,
        token_fields={} if loss_mask is None else {"loss_mask": np.asarray(loss_mask)},
    )


def test_fields_of_untrained_tokens_become_zero():
    fields = {"loss_mask": np.array([0, 1, 0]), "logprobs_old": np.array([-np.inf, -1.0, np.nan])}
    replayed = ReplayedMicrobatch.of(microbatch(**fields), torch.device("cpu"))
    assert replayed.fields["logprobs_old"].tolist() == [0.0, -1.0, 0.0]


def test_fields_may_have_more_axes():
    fields = {"loss_mask": np.array([1, 0]), "values": np.ones((2, 3))}
    replayed = ReplayedMicrobatch.of(microbatch(**fields), torch.device("cpu"))
    assert replayed.fields["values"].tolist() == [[1.0] * 3, [0.0] * 3]


def test_first_tokens_are_never_trained():
    assert num_trained_tokens(batch([1, 1, 0, 1, 1], [3, 2])) == 2


@pytest.mark.parametrize(
    ("loss_mask", "message"), [(None, "no loss_mask"), ([0.5, 1, 1], "one 0 or 1 for each"), ([1, 0, 0], "trains no token")]
)
def test_masks_that_train_nothing_or_are_no_mask_are_refused(loss_mask, message):
    with pytest.raises(TraceError, match=message):
        num_trained_tokens(batch(loss_mask, [3]))
