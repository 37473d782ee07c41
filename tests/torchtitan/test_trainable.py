"""Windows that cannot be trained on are refused by name, everywhere; and what slips through changes no weight."""

from dataclasses import replace

import numpy as np
import pytest
import windows

from routepack.core.errors import TraceError
from routepack.torchtitan.model.models import TinyQwen3MoE
from routepack.torchtitan.recorded.recorded_windows import UpdateSettings, load_training_window
from routepack.torchtitan.trainer.trainable_tokens import TokenCheck
from routepack.traces.trace_files import save_trace
from routepack.training.losses import GRPOTokenLoss

SPEC = TinyQwen3MoE(vocab_size=windows.VOCAB_SIZE, max_seq_len=64).model_spec()
NEEDS = GRPOTokenLoss.needs


def changed(name, value, *, position=1, sequence=3, dtype=None):
    """A window with *value* in a field, at a token of a sequence."""
    batch = windows.window(0)
    field_N = batch.token_fields[name].astype(dtype) if dtype else batch.token_fields[name].copy()
    mask_N = batch.token_fields["loss_mask"].copy()
    token = batch.cu_tokens[sequence] + position
    mask_N[token] = True
    field_N[token] = value
    return replace(batch, token_fields={**batch.token_fields, "loss_mask": mask_N, name: field_N})


def check(batch, **changes):
    TokenCheck(**{"spec": SPEC, "needs": NEEDS, **changes}).check(batch)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NEEDS)
def test_a_value_that_is_not_finite_is_refused_with_its_place(name, value):
    with pytest.raises(
        TraceError, match=rf"{name} is {value} at sequence 3, token 1 \(1 such tokens\), which loss_mask trains"
    ):
        check(changed(name, value))


def test_a_value_that_float32_cannot_hold_is_refused():
    with pytest.raises(TraceError, match=r"advantages is 1e\+200 at sequence 3, token 1"):
        check(changed("advantages", 1e200, dtype=np.float64))


def test_first_tokens_and_fields_that_nobody_reads_may_hold_anything():
    check(changed("logprobs_old", -np.inf, position=0))
    check(changed("logprobs_old", -np.inf), needs=("advantages",))


def test_untrained_tokens_may_hold_anything():
    batch = changed("logprobs_old", -np.inf)
    mask_N = np.isfinite(batch.token_fields["logprobs_old"]) & batch.token_fields["loss_mask"]
    check(replace(batch, token_fields={**batch.token_fields, "loss_mask": mask_N}))


@pytest.mark.parametrize("value", [-1, windows.VOCAB_SIZE])
@pytest.mark.parametrize("position", [0, 1])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(value, position):
    with pytest.raises(
        TraceError, match=rf"the batch has token id {value}; .* has 64, 0 .. 63: .* sequence 3, token {position}"
    ):
        check(changed("token_ids", value, position=position))


def test_token_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(TraceError, match=r"token_ids is float32 of shape"):
        check(changed("token_ids", 1, dtype=np.float32))


def test_a_mask_that_is_not_a_number_is_refused_with_its_place():
    with pytest.raises(TraceError, match=r"one 0 or 1 for each token.* It is nan at sequence 3, token 1"):
        check(changed("loss_mask", np.nan, dtype=np.float32))


def test_a_field_that_the_loss_reads_must_be_there():
    fields = {name: value for name, value in windows.window(0).token_fields.items() if name != "advantages"}
    with pytest.raises(TraceError, match=r"but no advantages: record them"):
        check(replace(windows.window(0), token_fields=fields))


def test_the_file_and_the_name_in_it_are_told(tmp_path):
    batch = changed("logprobs_old", -np.inf)
    fields = dict(batch.token_fields)
    fields["logprobs"] = fields.pop("logprobs_old")
    save_trace(replace(batch, token_fields=fields), path := tmp_path / "window.safetensors")
    with pytest.raises(TraceError, match=rf"{path}: logprobs is -inf at sequence 3, token 1"):
        load_training_window(path, TinyQwen3MoE(), GRPOTokenLoss(), UpdateSettings())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inf", "TraceError: the batch: logprobs_old is -inf at sequence 3, token "),
        ("nan", "TraceError: the batch: advantages is nan at sequence 3, token "),
        ("negative", "TraceError: the batch has token id -1; the model's vocabulary has 64"),
        ("beyond", "TraceError: the batch has token id 64; the model's vocabulary has 64"),
        ("missing", "but no advantages"),
    ],
)
def test_update_refuses_on_every_rank_what_one_cannot_train(guarded, name, message):
    assert message in guarded[1]["refuses"][name]
    assert "PlanError: another rank could not use its plan" in guarded[0]["refuses"][name]


def test_what_the_loss_does_not_read_is_not_refused(guarded):
    assert [result["refuses"]["unread"] for result in guarded] == ["no error"] * 2


@pytest.mark.parametrize("key", ["guards", "guards invariant"])
@pytest.mark.parametrize("name", ["nan", "inf", "overflow"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_told_on_every_rank(guarded, key, name):
    for result in guarded:
        assert "step 3 was not made: its loss is " in result[key]["said"][name]
        assert result[key]["unequal"][name] == []
        assert result[key]["num"] > 20


@pytest.mark.parametrize("key", ["guards", "guards invariant"])
def test_a_step_that_is_not_finite_is_not_counted_or_saved_and_training_goes_on(guarded, key):
    for result in guarded:
        assert result[key]["step"] == 2
        assert result[key]["kept"] == ["step-2"]
        assert np.isfinite(result[key]["loss"])
