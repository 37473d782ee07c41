"""Signs that a recording is not what it seems: repeated rows, layers that never route."""

from __future__ import annotations

import numpy as np

from routepack.core.rollouts import RolloutBatch
from routepack.traces.formats.convention import Reason
from routepack.traces.formats.import_options import ImportReport

LEAST_REPEATS = 16
"""Equal rows in a run from which on it is worth a word."""


def look_for_signs(batch: RolloutBatch, report: ImportReport, repeats_T: np.ndarray) -> None:
    """Add to *report* what looks wrong with *batch*. *repeats_T*: whether a row equals the one before it."""
    _repeated_rows(batch, report, repeats_T)
    _silent_layers(batch, report)
    beyond = report.masked_rows.get(Reason.OUT_OF_RANGE.text, 0)
    if beyond:
        report.suspicious.append(
            f"{beyond} rows hold ids of {batch.num_experts} or more: they look physical, or mark a shared expert."
        )


def _repeated_rows(batch: RolloutBatch, report: ImportReport, repeats_T: np.ndarray) -> None:
    runs_T = repeats_T.copy()
    runs_T[batch.cu_seqlens[:-1][np.diff(batch.cu_seqlens) > 0]] = False
    if batch.valid_T is not None:
        runs_T &= batch.valid_T
    edges = np.flatnonzero(np.diff(np.concatenate([[False], runs_T, [False]]).view(np.int8)))
    if not len(edges):
        return
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    report.longest_repeat = int(lengths[longest]) + 1
    if report.longest_repeat >= LEAST_REPEATS:
        row = int(edges[2 * longest]) - 1
        s = int(np.searchsorted(batch.cu_seqlens, row, side="right")) - 1
        report.suspicious.append(
            f"{report.longest_repeat} equal rows stand in a run, in sequence {s} from row {row - int(batch.cu_seqlens[s])} on: "
            "are they left over from another batch?"
        )


def _silent_layers(batch: RolloutBatch, report: ImportReport) -> None:
    """MoE columns of nothing but zeros, and dropped ones that are no run of dense layers at the start."""
    if report.dropped_layers != list(range(len(report.dropped_layers))):
        report.suspicious.append(
            f"Layers {report.dropped_layers} hold nothing but zeros and are left out: if they have a router, it was "
            "never recorded."
        )
    elif report.dropped_layers:
        report.note(f"Layers {report.dropped_layers} hold nothing but zeros and are left out, as dense layers are.")
    if not len(batch.routed_experts_TLK):
        return
    maybe = np.flatnonzero(~batch.routed_experts_TLK[:256].any(axis=(0, 2)))
    silent = [int(batch.layer_ids_L[layer]) for layer in maybe if not batch.routed_experts_TLK[:, layer].any()]
    if silent:
        report.suspicious.append(f"MoE layers {silent} hold nothing but zeros: they were not recorded.")
