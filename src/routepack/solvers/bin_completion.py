"""Do these lengths fit into so many bins? An exact search, bin completion (Korf 2002). V distinct lengths, longest first."""

from __future__ import annotations

import numpy as np
from numba import njit

NO, YES, UNDECIDED = 0, 1, -1
STEPS = 100_000_000
"""Looks at a length that bin completion may take for one question; about 0.1 s."""


def bin_completion(
    length_S: np.ndarray, max_tokens: int, num_bins: int, *, steps: int = STEPS
) -> tuple[int, np.ndarray | None]:
    """Whether the lengths fit into so many bins: NO, YES with ``cell_of_S``, or UNDECIDED after *steps* steps.

    Bin completion (Korf 2002): each bin takes the longest sequence left and one of the undominated sets that
    complete it; L2 of what is left, and the tokens that the bins can spare, cut the search.

    >>> bin_completion(np.array([6, 5, 4, 3, 2]), 10, 2)[0] == YES, bin_completion(np.array([6, 6, 6, 2]), 10, 2)[0] == NO
    (True, True)
    """
    value_V, kind_S, count_V = np.unique(-np.asarray(length_S, dtype=np.int64), return_inverse=True, return_counts=True)
    take_BV = np.zeros((num_bins, len(value_V)), dtype=np.int64)
    answer = _complete_bins(-value_V, count_V.astype(np.int64), max_tokens, num_bins, steps, take_BV)
    return int(answer), _dealt(kind_S, take_BV) if answer == YES else None


def _dealt(kind_S: np.ndarray, take_BV: np.ndarray) -> np.ndarray:
    """int32 [S]: bins of sequences, given how many of each kind a bin takes."""
    bins_V = [np.repeat(np.arange(len(take_BV)), take_B) for take_B in take_BV.T]
    cell_of_S = np.empty(len(kind_S), dtype=np.int32)
    cell_of_S[np.argsort(kind_S, kind="stable")] = np.concatenate(bins_V)
    return cell_of_S


@njit(nogil=True, cache=True)
def _l2(value_V, left_V, cap):
    """Martello and Toth's L2 of what is left; *value_V* falls."""
    values = value_V.size
    large, needed = 0, np.int64(0)
    while large < values and 2 * value_V[large] > cap:
        needed += left_V[large]
        large += 1
    best, beside, room, small = needed, large - 1, np.int64(0), np.int64(0)
    for i in range(large, values):
        if left_V[i] == 0:
            continue
        small += left_V[i] * value_V[i]
        while beside >= 0 and value_V[beside] <= cap - value_V[i]:
            room += left_V[beside] * (cap - value_V[beside])
            beside -= 1
        if small > room:
            best = max(best, needed + (small - room + cap - 1) // cap)
    return best


@njit(nogil=True, cache=True)
def _fill(value_V, left_V, take_V, first, room):
    """Take as many as fit, longest first, from *first* on; returns the room that stays."""
    for i in range(first, value_V.size):
        if left_V[i] > 0 and value_V[i] <= room:
            taken = min(left_V[i], room // value_V[i])
            take_V[i] += taken
            left_V[i] -= taken
            room -= taken * value_V[i]
    return room


@njit(nogil=True, cache=True)
def _dominated(value_V, left_V, take_V, first, room):
    """Whether one more sequence fits, or a longer one in place of one taken: then another completion is as good."""
    longest_left = -1
    for i in range(first, value_V.size):
        if longest_left >= 0 and take_V[i] > (i == first) and value_V[longest_left] <= value_V[i] + room:
            return True
        if left_V[i] > 0:
            if value_V[i] <= room:
                return True
            # The shortest of the longer ones left is the likeliest to fit.
            longest_left = i
    return False


@njit(nogil=True, cache=True)
def _next_completion(value_V, left_V, take_V, first, room, allowed):
    """The next set of a bin that holds one *first*, in falling lexicographic order; room that stays, or -1 at the end.

    Sets that leave more than *allowed* tokens unused are passed over.
    """
    last = value_V.size - 1
    beyond = np.int64(0)
    while last >= first:
        if take_V[last] > (last == first):
            take_V[last] -= 1
            left_V[last] += 1
            room += value_V[last]
            if room - beyond <= allowed:
                return _fill(value_V, left_V, take_V, last + 1, room)
        else:
            beyond += left_V[last] * value_V[last]
            last -= 1
            continue
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _complete_bins(value_V, count_V, cap, bins, steps, take_BV):
    """YES with the bins in *take_BV*, NO, or UNDECIDED after *steps* steps, each a look at one distinct length.

    Every bin takes the longest sequence left and a set that completes it. Passed over are sets that another set,
    later in no solution and earlier in the order, can replace, and those that waste more than the bins can spare.
    """
    left_V = count_V.copy()
    total = np.int64(0)
    for i in range(value_V.size):
        total += value_V[i] * count_V[i]
    first_B, room_B = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    spare_B = np.zeros(bins + 1, np.int64)
    spare_B[0] = bins * cap - total
    depth, fresh = 0, True
    if spare_B[0] < 0:
        return NO
    while steps > 0:
        steps -= value_V.size
        if fresh:
            first = 0
            while first < value_V.size and left_V[first] == 0:
                first += 1
            if first == value_V.size:
                take_BV[depth:] = 0
                return YES
            if depth == bins or depth + _l2(value_V, left_V, cap) > bins:
                depth, fresh = depth - 1, False
                if depth < 0:
                    return NO
                continue
            take_BV[depth] = 0
            take_BV[depth, first] = 1
            left_V[first] -= 1
            first_B[depth] = first
            room = _fill(value_V, left_V, take_BV[depth], first, cap - value_V[first])
        else:
            first = first_B[depth]
            room = _next_completion(value_V, left_V, take_BV[depth], first, room_B[depth], spare_B[depth])
            if room < 0:
                left_V[first] += 1
                depth -= 1
                if depth < 0:
                    return NO
                continue
        fresh, room_B[depth] = False, room
        if room <= spare_B[depth] and not _dominated(value_V, left_V, take_BV[depth], first, room):
            spare_B[depth + 1] = spare_B[depth] - room
            depth, fresh = depth + 1, True
    return UNDECIDED
