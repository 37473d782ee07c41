"""Each hook in its stack's own call shape, and the known faults of the stacks' packers, which must not be its own.

Shapes are those of the public sources of August 2026 (AReaL: May 2026); the calls below are written from them.
"""

from base64 import b64decode
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack as rp
from routepack.core.errors import ConfigError, InfeasibleError, PlanError, TraceError
from routepack.integrations.areal import ArealHook
from routepack.integrations.megatron import MegatronHook
from routepack.integrations.nemo_rl import NemoHook
from routepack.integrations.prime_rl import PrimeHook
from routepack.integrations.slime import SlimeHook
from routepack.integrations.torchtitan_rl import TorchTitanBatcherHook
from routepack.integrations.verl import VerlHook
from routepack.testing import synthetic_batch

QUICK = rp.Planner(
    topology=rp.Topology(data_parallel_degree=1, expert_parallel_degree=1),
    packer=rp.AttentionAwarePacker(max_tokens=1),
    rerouter=rp.IdentityRerouter(),
    num_proposals=300,
)
LENGTHS = [30, 12, 7, 25, 18, 9, 14, 22, 5, 11, 28, 16]
windows = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def bins(lengths, cap):
    """How many first fit takes, longest first: no fewer than are needed."""
    found = []
    for length in sorted(lengths, reverse=True):
        fits = next((i for i, full in enumerate(found) if full + length <= cap), None)
        if fits is None:
            found.append(length)
        else:
            found[fits] += length
    return len(found)


def slime(lengths, *, cap=40, ranks=2, per_step=None, rollouts=None, hook=None, args=(), config=()):
    rollouts = list(range(len(lengths))) if rollouts is None else rollouts
    settings = SimpleNamespace(
        **{"use_dynamic_batch_size": True, "max_tokens_per_gpu": cap, "balance_data": True, "micro_batch_size": None}
        | dict(args)
    )
    parallel = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": None} | dict(config)
    hook = hook or SlimeHook(planner=QUICK)
    return hook(settings, parallel, lengths, global_batch_size=per_step or len(set(rollouts)), rollout_indices=rollouts)


@settings(max_examples=30)
@given(lengths=windows, ranks=st.integers(1, 4), per_step=st.integers(1, 30))
def test_slime_places_every_sample_of_its_full_steps_once(lengths, ranks, per_step):
    try:
        partitions, microbatches, counts, rollouts = slime(lengths, cap=25, ranks=ranks, per_step=per_step)
    except InfeasibleError:
        return
    kept = sorted(s for partition in partitions for s in partition)
    assert kept == list(range(len(lengths) // per_step * per_step))
    assert rollouts == [per_step] * (len(lengths) // per_step)
    for partition, own in zip(partitions, microbatches, strict=True):
        assert [i for cell in own for i in cell] == list(range(len(partition)))
        assert len(own) == sum(counts)
        assert all(0 < sum(lengths[partition[i]] for i in cell) <= 25 for cell in own)


def test_slime_keeps_a_rollout_s_samples_in_one_step_and_drops_the_rest():
    partitions, microbatches, counts, rollouts = slime([5] * 7, per_step=2, rollouts=[7, 7, 3, 3, 9, 9, 4])
    firsts = [
        {partition[i] for cell in own[: counts[0]] for i in cell}
        for partition, own in zip(partitions, microbatches, strict=True)
    ]
    assert set.union(*firsts) == {0, 1, 2, 3}
    assert sorted(s for partition in partitions for s in partition) == [0, 1, 2, 3, 4, 5, 6]
    assert rollouts == [2, 2]
    assert slime([5] * 7, per_step=3, rollouts=[7, 7, 3, 3, 9, 9, 4])[3] == [3]


def test_miles_may_train_a_partial_step():
    partial = {"allow_partial_train_step": True}
    assert slime([5] * 7, per_step=4, args=partial, config={"vpp_size": None})[3] == [4, 3]
    assert slime([5] * 5, per_step=4, args=partial)[3] == [4], "one sample cannot fill two ranks"


def test_slime_counts_context_parallel_room_and_interleaved_stages():
    parallel = {"cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 3}
    partitions, microbatches, counts, _ = slime(LENGTHS, cap=20, config=parallel)
    assert counts[0] % 3 == 0
    assert max(sum(LENGTHS[p[i]] for i in cell) for p, own in zip(partitions, microbatches, strict=True) for cell in own) <= 40


def test_slime_plans_with_the_routes_that_it_was_told_to_expect():
    batch = synthetic_batch(num_sequences=16, max_length=40)
    hook = SlimeHook(planner=QUICK)
    hook.expect(batch)
    slime(batch.num_tokens_S.tolist(), per_step=8, hook=hook)
    assert [planned.by_routing for planned in hook.schedules] == [True, True]
    assert hook.schedules[1].plan.length_S.tolist() == batch.num_tokens_S[8:].tolist()


def test_slime_without_dynamic_batch_size_is_refused():
    with pytest.raises(ConfigError, match="use_dynamic_batch_size is off"):
        slime(LENGTHS, args={"use_dynamic_batch_size": False})


def test_fewer_rollouts_than_a_step_are_refused():
    with pytest.raises(InfeasibleError, match="global_batch_size=5"):
        slime([5] * 4, per_step=5)


@settings(max_examples=30)
@given(lengths=windows, ranks=st.integers(1, 4), cp=st.integers(1, 3))
def test_megatron_s_groups_hold_each_sample_once_a_context_parallel_rank(lengths, ranks, cp):
    hook = MegatronHook(planner=QUICK, max_seqlen_per_dp_cp_rank=20, cp_size=cp, dp_size=ranks)
    samples = [(100 + s, length) for s, length in enumerate(lengths)]
    try:
        groups = hook.get_groups_and_subsamples(samples)
    except InfeasibleError:
        assert len(lengths) < -(-bins(lengths, 20 * cp) // ranks) * ranks
        return
    by_id = dict(samples)
    for group in groups:
        assert len(group) == ranks * cp
        assert all(0 < sum(by_id[i] for i in own) <= 20 * cp for own in group)
        assert all(group[r] == group[r // cp * cp] for r in range(ranks * cp))
    assert sorted(i for group in groups for own in group[::cp] for i in own) == sorted(by_id)


@settings(max_examples=30)
@given(values=windows, least=st.integers(1, 6), divisor=st.integers(1, 4))
def test_areal_s_groups_keep_capacity_divisor_and_minimum(values, least, divisor):
    try:
        groups = ArealHook(planner=QUICK)(values, 25, min_groups=least, n_groups_divisor=divisor)
    except InfeasibleError:
        assert len(values) < -(-max(least, bins(values, 25)) // divisor) * divisor
        return
    assert len(groups) >= least
    assert len(groups) % divisor == 0
    assert sorted(i for group in groups for i in group) == list(range(len(values)))
    assert all(0 < sum(values[i] for i in group) <= 25 for group in groups)


def test_areal_s_ranks_agree_on_a_number_of_groups_at_the_second_try():
    ranks = [[7] * 8, [3] * 9, [2, 2, 8, 8, 8]]
    hook = ArealHook(planner=QUICK)
    most = max(len(hook(values, 16, min_groups=1)) for values in ranks)
    assert {len(hook(values, 16, min_groups=most)) for values in ranks} == {most}


def test_areal_shares_trajectories_out_by_their_routes():
    batch = synthetic_batch(num_sequences=24, max_length=40)
    hook = ArealHook(planner=QUICK)
    hook.expect(batch)
    groups = hook(batch.num_tokens_S.tolist(), capacity=int(1e12), min_groups=4)
    assert (len(groups), hook.schedules[0].by_routing) == (4, True)


@settings(max_examples=30)
@given(lengths=windows, shards=st.integers(1, 4), least=st.integers(1, 6))
def test_nemo_s_bins_need_no_adjusting(lengths, shards, least):
    try:
        found = NemoHook(planner=QUICK).pack(lengths, 25, min_bin_count=least, bin_count_multiple=shards)
    except InfeasibleError:
        return
    assert len(found) >= least
    assert len(found) % shards == 0
    assert sorted(s for one in found for s in one) == list(range(len(lengths)))
    assert all(0 < sum(lengths[s] for s in one) <= 25 for one in found)


def test_nemo_s_shards_are_cut_into_chunks_and_microbatches_of_padded_sequences():
    lengths, cap = np.array(LENGTHS), 64
    shards = NemoHook(planner=QUICK).shard_by_batch_size(
        lengths, 2, batch_size=6, max_tokens_per_microbatch=cap, sequence_length_pad_multiple=8
    )
    assert sorted(shards.batch_sorted_indices) == list(range(12))
    padded = -(-lengths // 8) * 8
    for shard in range(2):
        first = 0
        for chunk in range(2):
            ends, count = shards.micro_batch_indices[shard][chunk], shards.elem_counts_per_gb[shard][chunk]
            own = shards.indices[shard][first : first + count]
            assert {s // 6 for s in own} == {chunk}
            assert [end - begin for begin, end in ends] == [len(own[begin:end]) for begin, end in ends]
            sums = [int(padded[own[begin:end]].sum()) for begin, end in ends]
            assert sums == shards.micro_batch_lengths[shard][chunk]
            assert 0 < max(sums) <= cap
            first += count
        assert first == len(shards.indices[shard])
    assert len({len(chunk) for shard in shards.micro_batch_indices for chunk in shard[:1]}) == 1


def test_nemo_s_bins_are_dealt_round_robin_as_planned():
    hook = NemoHook(planner=QUICK)
    found = hook.pack(LENGTHS, 40, bin_count_multiple=3)
    for shard in range(3):
        assert found[shard::3] == hook.schedules[0].rank(shard)


def test_nemo_s_chunks_must_divide_the_batch():
    with pytest.raises(ConfigError, match="batch_size=5 does not divide the 12"):
        NemoHook(planner=QUICK).shard_by_batch_size(LENGTHS, 2, 5, max_tokens_per_microbatch=64)


@settings(max_examples=30)
@given(lengths=windows, ranks=st.integers(1, 3), parts=st.integers(1, 2))
def test_verl_s_ranks_find_the_microbatches_that_were_planned(lengths, ranks, parts):
    lengths = lengths * ranks * parts
    hook = VerlHook(planner=QUICK)
    balanced = hook.balance_batch(
        lengths, ranks, max_token_len=60, minibatch_size=len(lengths) // parts, num_batches_divided_by=1
    )
    size = len(lengths) // ranks
    assert sorted(balanced.order) == list(range(len(lengths)))
    counts = set()
    for rank in range(ranks):
        own = balanced.order[rank * size : (rank + 1) * size]
        assert own == balanced.partitions[rank]
        cells = hook.planned_micro_batches(balanced.microbatch_of_S[own])
        counts.add(len(cells))
        assert sorted(i for cell in cells for i in cell) == list(range(size))
        assert max(sum(lengths[own[i]] for i in cell) for cell in cells) <= 60
        for part in range(parts):
            mini = own[part * size // parts : (part + 1) * size // parts]
            assert {s * parts // len(lengths) for s in mini} == {part}
    assert counts == {sum(planned.num_microbatches for planned in hook.schedules)}


def test_verl_s_batch_split_otherwise_than_planned_is_noticed():
    with pytest.raises(PlanError, match="have gaps"):
        VerlHook().planned_micro_batches([0, 0, 2])


def test_verl_s_ranks_that_gather_agree_on_a_number():
    ranks = [[7] * 4, [10, 9, 8, 8, 8]]
    needs = [(2, 4), (4, 5)]
    found = [
        VerlHook(planner=QUICK).prepare_micro_batches(lengths, max_token_len=16, gather=lambda mine: [*needs, mine])
        for lengths in ranks
    ]
    assert [len(cells) for cells in found] == [4, 4]
    for cells, lengths in zip(found, ranks, strict=True):
        assert max(sum(lengths[i] for i in cell) for cell in cells) <= 16


@pytest.mark.parametrize("mine", [[16, 16, 16], [5]], ids=["needs", "lacks"])
def test_no_rank_of_verl_is_left_waiting_where_one_has_too_few(mine):
    others = [(3, 3), (1, 1)]
    with pytest.raises(InfeasibleError, match="needs 3 microbatches on some rank and one has only 1"):
        VerlHook(planner=QUICK).prepare_micro_batches(mine, max_token_len=16, gather=lambda _: others)


def test_a_sequence_above_verl_s_cap_stops_all_ranks():
    told = []
    with pytest.raises(InfeasibleError, match="the longest has 17"):
        VerlHook(planner=QUICK).prepare_micro_batches(
            [17, 3], max_token_len=16, gather=lambda mine: told.append(mine) or [mine, (1, 9)]
        )
    assert told == [(3, 2)]


def sample(length, *, routes=None, images=None, first=0):
    return SimpleNamespace(token_ids=list(range(first, first + length)), routed_experts=routes, mm_kwargs=images)


def prime(rollouts, *, seq_len=40, workers=2, multiple=1, **options):
    hook = PrimeHook(
        planner=QUICK,
        materialize=lambda samples, pad: {"samples": samples, "pad": pad, "dummy": False},
        make_dummy=lambda microbatch: microbatch | {"dummy": True},
        **options,
    )
    return hook, hook.prepare_batch(rollouts, seq_len, workers, lambda seqlens: sum(seqlens), multiple)


def test_prime_s_workers_get_every_sample_once_in_equally_many_microbatches():
    rollouts = [sample(length) for length in LENGTHS]
    _, workers = prime(rollouts, workers=3, multiple=8)
    assert len({len(own) for own in workers}) == 1
    there = [one for own in workers for microbatch in own for one in microbatch["samples"] if not microbatch["dummy"]]
    assert sorted(map(id, there)) == sorted(map(id, rollouts))
    assert all(sum(len(one.token_ids) for one in m["samples"]) <= 40 and m["pad"] == 8 for own in workers for m in own)


def test_prime_s_images_have_steps_of_their_own_and_dummies_of_their_kind():
    images = {"pixel_values": SimpleNamespace(dtype="float32", shape=[4, 8])}
    rollouts = [sample(9, images=images), *(sample(length) for length in LENGTHS)]
    _, workers = prime(rollouts, workers=4)
    kinds = [[{one.mm_kwargs is None for one in own[step]["samples"]} for own in workers] for step in range(len(workers[0]))]
    assert all(len(set.union(*step)) == 1 for step in kinds)
    assert [m["dummy"] for own in workers for m in own if m["samples"][0].mm_kwargs is not None].count(True) == 3


def test_prime_s_samples_without_routes_never_share_a_microbatch_with_those_that_have_them():
    routes = SimpleNamespace(data=bytes(8), shape=[4, 1, 2], dtype="uint8")
    _, workers = prime([sample(4, routes=routes), sample(4), sample(4, routes=routes), sample(4)])
    assert all(len({one.routed_experts is None for one in m["samples"]}) == 1 for own in workers for m in own)


def test_prime_s_own_routes_are_counted_and_cut_with_the_tokens():
    from routepack.traces.formats.stacks.prime_rl import export

    batch = synthetic_batch(num_sequences=12, max_length=40, num_layers=6)
    rollouts = [
        SimpleNamespace(
            token_ids=list(one["token_ids"]),
            mm_kwargs=None,
            routed_experts=SimpleNamespace(**one["routed_experts"] | {"data": b64decode(one["routed_experts"]["data"])}),
        )
        for one in export(batch)
    ]
    model = rp.formats.ModelRouting(num_experts=batch.num_experts, num_layers=6, top_k=2)
    hook, _ = prime(rollouts, model=model)
    assert hook.schedules[0].by_routing
    assert hook.schedules[0].plan.demand_digest == rp.RoutingDemandCollector().collect(batch).digest
    hook, _ = prime(rollouts, model=model, seq_len=20)
    assert hook.schedules[0].plan.length_S.max() == 20


def test_prime_without_rollouts_is_refused():
    with pytest.raises(TraceError, match="rollouts is empty"):
        prime([])


@settings(max_examples=30)
@given(lengths=windows, rows=st.integers(1, 3), ranks=st.integers(1, 4))
def test_torchtitan_s_rows_are_dealt_as_planned(lengths, rows, ranks):
    hook = TorchTitanBatcherHook(planner=QUICK)
    found = hook.rows(lengths, seq_len=25, local_batch_size=rows, dp_degree=ranks)
    assert len(found) % (rows * ranks) == 0
    assert sorted(s for row in found for s in row) == list(range(len(lengths)))
    assert all(sum(lengths[s] for s in row) <= 25 for row in found)
    microbatches = len(found) // (rows * ranks)
    for rank in range(ranks):
        planned = sorted(cell for cell in hook.schedules[0].rank(rank) if cell != [-1])
        assert sorted(row for row in found[rank::ranks] if row) == planned
        filled = [sum(map(bool, found[m * ranks + rank :: microbatches * ranks])) for m in range(microbatches)]
        assert len(planned) < microbatches or min(filled) > 0, "a microbatch of padding alone, and another with two rows"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torchtitan_s_padding_rows_are_spread_over_a_rank_s_microbatches(ranks):
    rng = np.random.default_rng(ranks)
    for count in range(3, 15):
        hook = TorchTitanBatcherHook(planner=QUICK)
        found = hook.rows(rng.integers(14, 26, count).tolist(), seq_len=25, local_batch_size=3, dp_degree=ranks)
        microbatches = len(found) // (3 * ranks)
        for rank in range(ranks):
            filled = [sum(map(bool, found[m * ranks + rank :: microbatches * ranks])) for m in range(microbatches)]
            assert max(filled) - min(filled) <= 1


# The known faults, as their reports have them.


@pytest.mark.parametrize("lengths", [[7] * 8, [30_720] * 16], ids=["verl#7553", "verl#7553, long"])
def test_no_microbatch_exceeds_the_cap_where_the_total_would_fit(lengths):
    cap = lengths[0] + 1
    cells = VerlHook(planner=QUICK).prepare_micro_batches(lengths, max_token_len=cap)
    assert max(sum(lengths[i] for i in cell) for cell in cells) <= cap


def test_areal_kk_s_divisor_holds():
    """kk_allocate cuts its number of groups to the number of values after the divisor."""
    with pytest.raises(InfeasibleError):
        ArealHook(planner=QUICK)([5, 5, 5], 8, min_groups=1, n_groups_divisor=2)
    assert len(ArealHook(planner=QUICK)([5, 5, 5, 5], 8, min_groups=3, n_groups_divisor=2)) == 4


def test_megatron_s_first_microbatch_is_not_empty_when_the_first_sample_is_too_long():
    hook = MegatronHook(planner=QUICK, max_seqlen_per_dp_cp_rank=8, cp_size=1, dp_size=1)
    with pytest.raises(InfeasibleError, match=r"sequence 0 \(9 tokens\)"):
        hook.get_groups_and_subsamples([(0, 9), (1, 3)])


def test_nemo_s_bins_are_balanced_over_ranks_not_only_dealt():
    """Longest first and round-robin gives rank 0 the longest of every round."""
    lengths = [40, 39, 38, 3, 2, 1, 40, 39, 38, 3, 2, 1]
    found = NemoHook(planner=rp.Planner(**{**vars(QUICK), "num_proposals": 20_000})).pack(lengths, 41, bin_count_multiple=2)
    squares = [sum(lengths[s] ** 2 for one in found[rank::2] for s in one) for rank in range(2)]
    assert max(squares) / min(squares) < 1.02


def test_nine_over_four_leaves_no_rank_without_a_sequence():
    planned = MegatronHook(planner=QUICK, max_seqlen_per_dp_cp_rank=100, cp_size=1, dp_size=4)
    groups = planned.get_groups_and_subsamples([(s, 5) for s in range(9)])
    sizes = [len(own) for own in groups[0]]
    assert max(sizes) - min(sizes) <= 1


def test_206_samples_on_four_ranks_work():
    partitions, *_ = slime([5] * 206, cap=100, ranks=4)
    assert sum(map(len, partitions)) == 206


def test_fewer_samples_than_cells_are_the_same_error_on_every_rank():
    """verl#1617: 3 samples, and the number of microbatches must divide by 4."""
    with pytest.raises(InfeasibleError, match="microbatch_multiple"):
        slime([5] * 3, ranks=1, config={"vpp_size": 2, "microbatch_group_size_per_vp_stage": 4})
