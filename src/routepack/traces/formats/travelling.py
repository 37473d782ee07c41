"""The fields of a record that travel with its routes: token ids, loss mask, log-probabilities, advantages, reward, group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from routepack.core.checks import whole
from routepack.core.errors import TraceError
from routepack.traces.formats.fields import flat_array, value_of

TOKEN_FIELDS = {
    "loss_mask": ("loss_mask", "mask", "response_mask"),
    "logprobs": ("logprobs", "log_probs", "rollout_log_probs", "inference_logprobs"),
    "advantages": ("advantages",),
}
"""Our name and the stacks' names; taken where there is one value a token."""
SEQUENCE_FIELDS = {"rewards": ("reward", "reward_score")}
GROUPS = ("group_index", "group", "group_id")


def travelling(record: Any, token_ids: np.ndarray | None, where: str) -> dict[str, Any]:
    """``token_fields``, ``sequence_fields`` and ``group`` of a record, as :class:`RecordedSequence` takes them."""
    token_fields = {} if token_ids is None else {"token_ids": token_ids}
    for name, names in TOKEN_FIELDS.items():
        value = value_of(record, *names)
        # Masks and log-probabilities of the response alone have no place among the tokens without its length.
        if token_ids is not None and isinstance(value, Sequence | np.ndarray) and len(value) == len(token_ids):
            token_fields[name] = flat_array(value, f"{where}: {name}")
    sequence_fields = {}
    for name, names in SEQUENCE_FIELDS.items():
        value = value_of(record, *names)
        if isinstance(value, int | float) and not isinstance(value, bool):
            sequence_fields[name] = float(value)
    return {"token_fields": token_fields, "sequence_fields": sequence_fields, "group": _group(record, where)}


def _group(record: Any, where: str) -> int | None:
    value = value_of(record, *GROUPS)
    return None if value is None else whole(f"{where}: group", value, least=0, error=TraceError)
