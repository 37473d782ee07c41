"""What each rank does on its own; the collectives run in integrations/torchtitan."""

import pytest

from routepack import distributed
from routepack.errors import PlanError, RankLostError, TraceError


def test_one_rank_agrees_with_itself():
    distributed.agree("ab" * 32, "plan")


def test_an_error_is_raised_where_it_arose():
    with pytest.raises(TraceError, match="mine"):
        distributed.agree("ab" * 32, "plan", error=TraceError("mine"))


def test_a_plan_that_nobody_made_cannot_be_shared():
    with pytest.raises(PlanError, match="rank 0 has no plan"):
        distributed.broadcast_plan(None)


def test_a_lost_peer_is_named_with_what_was_going_on():
    message = r"lost another rank while experts moved \(\[gloo/x.cc:1\] Connection closed\)"
    with pytest.raises(RankLostError, match=message), distributed.together("experts moved"):
        raise RuntimeError("[gloo/x.cc:1] Connection closed\nmore")


def test_an_error_that_is_not_the_transports_passes():
    with pytest.raises(RuntimeError, match="shape"), distributed.together("experts moved"):
        raise RuntimeError("shape mismatch")
