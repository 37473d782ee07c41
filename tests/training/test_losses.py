import pytest
import torch

from routepack.core.errors import ConfigError
from routepack.training.losses import CrossEntropyTokenLoss, GRPOTokenLoss


def fields(ratio, advantages):
    logprobs = torch.log(torch.tensor(ratio))
    return logprobs, {"logprobs_old": torch.zeros(len(ratio)), "advantages": torch.tensor(advantages)}


def gradient(loss, logprobs, fields):
    logprobs.requires_grad_()
    loss(logprobs, fields).sum().backward()
    return logprobs.grad.tolist()


def test_cross_entropy_is_minus_the_log_probability():
    assert CrossEntropyTokenLoss()(torch.tensor([-1.5, 0.0]), {}).tolist() == [1.5, 0.0]


def test_unclipped_tokens_follow_the_advantage():
    assert gradient(GRPOTokenLoss(), *fields([1.0, 1.0], [2.0, -3.0])) == [-2.0, 3.0]


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_clipped_tokens_get_no_gradient(ratio, advantage):
    assert gradient(GRPOTokenLoss(), *fields([ratio], [advantage])) == [0.0]


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0)])
def test_tokens_that_went_the_wrong_way_are_not_clipped(ratio, advantage):
    assert gradient(GRPOTokenLoss(), *fields([ratio], [advantage])) == pytest.approx([-ratio * advantage])


def test_the_upper_clip_may_be_higher():
    loss = GRPOTokenLoss(clip_low=0.2, clip_high=0.6)
    assert gradient(loss, *fields([1.5], [1.0])) == pytest.approx([-1.5])


def test_clip_fraction_counts_tokens_without_a_gradient():
    logprobs, given = fields([1.5, 0.5, 1.5, 1.0], [1.0, -1.0, -1.0, 1.0])
    assert GRPOTokenLoss().metrics(logprobs, given)["clip_fraction"].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_policy_kl_is_zero_where_nothing_changed_and_positive_elsewhere():
    logprobs, given = fields([1.0, 2.0, 0.5], [1.0, 1.0, 1.0])
    kl = GRPOTokenLoss().metrics(logprobs, given)["policy_kl"].tolist()
    assert kl[0] == 0.0
    assert min(kl[1:]) > 0.1


@pytest.mark.parametrize("clip", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}])
def test_clips_out_of_range_are_refused(clip):
    with pytest.raises(ConfigError, match=f"loss.{next(iter(clip))}"):
        GRPOTokenLoss(**clip)
