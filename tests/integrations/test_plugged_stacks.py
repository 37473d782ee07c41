"""The guides' own lines, switched on in the stacks' real modules, where those can be imported; and switched off again.

``ROUTEPACK_STACKS`` names folders that go before all others on the module path: the stacks' packages, and what they import
(``pip install --no-deps --target FOLDER verl megatron-core tensordict ray hydra-core transformers ...``; no stack needs its
GPU parts for this). Without it, or where a stack lacks a module, its tests skip and say which.
"""

import ast
import importlib
import os
import re
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import routepack as rp
from routepack import testing

torch = pytest.importorskip("torch")

GUIDES = Path(__file__).parents[2] / "docs/guides/stacks"
EXPERTS, LAYERS, TOP_K = 16, 4, 2
# Other projects' warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def real(name):
    """A stack's module; skips where it, or what it imports, is not there."""
    folders = [part for part in os.environ.get("ROUTEPACK_STACKS", "").split(os.pathsep) if part]
    if not folders:
        pytest.skip("set ROUTEPACK_STACKS to folders that hold the stacks' packages")
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # verl imports TorchTitan, which has to be told first that there is no accelerator.
            importlib.import_module("routepack.torchtitan")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
        return None


def switched_on(page, **names):
    """What the guide's first block defines."""
    code = re.search(r"## Switch it on\n\n```python\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)[1]
    exec(compile(code, page, "exec"), names)
    return names


def method_of(path, name, scope):
    """A method of a stack's file by itself, as a function that sees *scope*."""
    method = next(node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", None) == name)
    exec(compile("from __future__ import annotations\n" + ast.unparse(method), str(path), "exec"), scope)
    return scope.pop(name)


@pytest.fixture
def batch():
    """Sequences with routes for all but the last token, none longer than 60."""
    return testing.synthetic_batch(
        num_sequences=16, max_length=60, num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K, skew=1.0, seed=3
    )


def test_megatron_s_scheduler_class(batch):
    module = real("megatron.core.datasets.data_schedule")
    if not hasattr(module, "DpBalancedScheduler"):
        pytest.skip("this Megatron-core has no DpBalancedScheduler")
    scheduler = module.DpBalancedScheduler
    original = scheduler.get_groups_and_subsamples
    figures = {"max_seqlen_per_dp_cp_rank": 64, "cp_size": 2, "dp_size": 2, "microbatch_group_size_per_vp_stage": None}
    samples = list(enumerate((-(-batch.num_tokens_S // 4) * 4).tolist()))
    theirs = scheduler(**figures).get_groups_and_subsamples(samples)
    switched_on("megatron.md")["switch_on"](scheduler)
    try:
        ours = scheduler(**figures).get_groups_and_subsamples(samples)
    finally:
        scheduler.get_groups_and_subsamples = original
    for groups in (theirs, ours):
        assert {len(group) for group in groups} == {4}
        assert sorted(i for group in groups for rank in group[::2] for i in rank) == list(range(16))
    assert len(ours) <= len(theirs)
    assert max(sum(samples[i][1] for i in rank) for group in ours for rank in group) <= 128
    assert scheduler(**figures).get_groups_and_subsamples(samples) == theirs, "switched off"


def training_data(batch, stack):
    samples = rp.formats.stack_module(stack).export(batch)
    return {name: [sample[name] for sample in samples] for name in ("tokens", "rollout_routed_experts")} | {
        "rollout_ids": list(range(16))
    }


def schedule_arguments():
    args = types.SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=128, balance_data=True, balance_by_flops=False,
        micro_batch_size=None, global_batch_size=8, rollout_data_transport="object-store",
        # What slime's own schedule works FLOPs out from.
        hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16, vocab_size=100, ffn_hidden_size=64,
        num_experts=None, num_layers=2, q_lora_rank=None, kv_lora_rank=None, multi_latent_attention=False,
    )  # fmt: skip
    return args, {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def check_shards(shards, batch):
    assert sorted(s for shard in shards for s in shard["partition"]) == list(range(16))
    for shard in shards:
        for microbatch in shard["micro_batch_indices"]:
            assert sum(int(batch.num_tokens_S[shard["partition"][i]]) for i in microbatch) <= 128
        for s, routes in zip(shard["partition"], shard["rollout_routed_experts"], strict=True):
            assert len(routes) == batch.num_tokens_S[s] - 1
        assert len(shard["micro_batch_indices"]) == sum(shard["num_microbatches"])


def test_slime_s_manager(batch, monkeypatch):
    """The method that calls the schedule, with the class around it left out: that takes SGLang."""
    schedules = real("slime.utils.dp_schedule")
    own = schedules.build_dp_schedule
    rollout = types.ModuleType("rollout")
    rollout.__dict__.update(
        build_dp_schedule=own, tensorize_rollout_data_for_training=lambda data: None, Box=lambda kept: kept,
        ray=types.SimpleNamespace(put=lambda kept: kept),
    )  # fmt: skip
    path = Path(schedules.__file__).parents[1] / "ray/rollout.py"

    class Manager:
        _split_train_data_by_dp = method_of(path, "_split_train_data_by_dp", rollout.__dict__)

    manager, split = Manager(), Manager._split_train_data_by_dp
    manager.args, manager.train_parallel_config = schedule_arguments()
    check_shards(manager._split_train_data_by_dp(training_data(batch, "slime")), batch)
    scope = switched_on("slime.md")
    scope["switch_on"](rollout, Manager)
    check_shards(manager._split_train_data_by_dp(training_data(batch, "slime")), batch)
    assert [planned.by_routing for planned in scope["hook"].schedules] == [True, True]
    rollout.build_dp_schedule, Manager._split_train_data_by_dp = own, split
    check_shards(manager._split_train_data_by_dp(training_data(batch, "slime")), batch)
    assert len(scope["hook"].schedules) == 2, "switched off"


def test_miles_own_split(batch, monkeypatch):
    module = real("miles.ray.rollout.train_data_conversion")
    args, config = schedule_arguments()
    scope, data = switched_on("slime.md"), training_data(batch, "miles")
    monkeypatch.setattr(module, "build_dp_schedule", scope["hook"])
    samples = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    scope["hook"].expect(rp.formats.load("miles", samples, scope["model"]).batch)
    check_shards(module.split_train_data_by_dp_scheduled_raw(args, data, train_parallel_config=config), batch)
    assert [planned.by_routing for planned in scope["hook"].schedules] == [True, True]


def test_nemo_s_shards(batch, monkeypatch):
    dictionaries, packing = real("nemo_rl.distributed.batched_data_dict"), real("nemo_rl.data.packing.algorithms")
    own = dictionaries.get_packer
    monkeypatch.setattr(dictionaries, "get_packer", own)
    exported = rp.formats.stack_module("nemo-rl").export(batch)
    lengths = torch.as_tensor(batch.num_tokens_S)
    data = dictionaries.BatchedDataDict(
        input_ids=torch.zeros(16, 64, dtype=torch.int64), input_lengths=lengths, sequence=torch.arange(16)
    )
    asked = {
        "max_tokens_per_microbatch": 128, "input_key": "input_ids", "input_lengths_key": "input_lengths",
        "algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 64, "microbatch_order": "packer",
    }  # fmt: skip
    theirs, _ = data.shard_by_batch_size(2, sequence_packing_args=asked)
    scope = switched_on("nemo_rl.md")
    scope["switch_on"](dictionaries, packing)
    scope["hook"].expect(rp.formats.load("nemo-rl", exported, rp.formats.ModelRouting(num_experts=EXPERTS)).batch)
    ours, _ = data.shard_by_batch_size(2, sequence_packing_args=asked)
    planned = scope["hook"].schedules[0]
    assert planned.by_routing
    for shards in (theirs, ours):
        assert sorted(s for shard in shards for s in shard["sequence"].tolist()) == list(range(16))
    for rank, shard in enumerate(ours):
        found = [part["sequence"].tolist() for part in shard.make_microbatch_iterator_for_packable_sequences()]
        assert [sorted(one) for one in found] == [sorted(cell) for cell in planned.rank(rank)]
    dictionaries.get_packer = own
    data.shard_by_batch_size(2, sequence_packing_args=asked)
    assert len(scope["hook"].schedules) == 1, "switched off"


def test_areal_s_microbatches_and_shares(batch, monkeypatch, tmp_path):
    data, rollout = real("areal.utils.data"), real("areal.infra.dist_rollout")
    for module in (data, rollout):
        monkeypatch.setattr(module, "get_allocate_fn", module.get_allocate_fn)
    scope = switched_on("areal.md")
    scope["switch_on"](data, rollout)
    cli = importlib.import_module("areal.api.cli_args")
    wanted = cli.MicroBatchSpec(n_mbs=3, n_mbs_divisor=3, max_tokens_per_mb=128)
    lengths = batch.num_tokens_S.tolist()
    groups = data.allocate_balanced_mbs(wanted, lengths)
    assert sorted(s for group in groups for s in group) == list(range(16))
    assert len(groups) % 3 == 0
    assert max(sum(lengths[s] for s in group) for group in groups) <= 128
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        scope["hook"].expect(batch)
        own = [{"attention_mask": torch.ones(1, n, dtype=torch.bool)} for n in lengths]
        share = rollout.redistribute_trajectories(own)
    finally:
        torch.distributed.destroy_process_group()
    assert [sorted(group) for group in share.group_indices] == [list(range(16))]
    assert scope["hook"].schedules[-1].by_routing


def test_verl_s_trainer_and_engine(batch, monkeypatch):
    trainer, engine = real("verl.trainer.ppo.ray_trainer"), real("verl.workers.engine.utils")
    protocol = importlib.import_module("verl.protocol")
    tensordict = importlib.import_module("tensordict")
    scope = switched_on("verl.md", torch=torch)
    monkeypatch.setattr(trainer.RayPPOTrainer, "_balance_batch", scope["balance_batch"])
    monkeypatch.setattr(engine, "rearrange_micro_batches", scope["rearrange_micro_batches"])
    recorded = rp.formats.stack_module("verl").export(batch, dense=True)
    tensors = {name: torch.as_tensor(recorded[name]) for name in ("routed_experts", "attention_mask")}
    window = protocol.DataProto.from_dict(tensors=tensors | {"sequence": torch.arange(16)})
    controller = trainer.RayPPOTrainer.__new__(trainer.RayPPOTrainer)
    controller.dp_size = 2
    actor = types.SimpleNamespace(ppo_max_token_len_per_gpu=128, ppo_mini_batch_size=16)
    controller.config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(actor=actor))
    controller._balance_batch(window, metrics={})
    assert scope["hook"].schedules[0].by_routing
    found = []
    for rank, part in enumerate(window.chunk(2)):
        own = tensordict.TensorDict(dict(part.batch.items()), batch_size=[8])
        own.set_non_tensor("max_token_len_per_gpu", 128)
        micro_batches, indices = engine.prepare_micro_batches(own)
        assert [len(one) for one in micro_batches] == [len(one) for one in indices]
        found.append([sorted(one["sequence"].tolist()) for one in micro_batches])
        assert found[-1] == [sorted(cell) for cell in scope["hook"].schedules[0].rank(rank)]
        assert max(int(one["attention_mask"].sum()) for one in micro_batches) <= 128
    assert sorted(s for rank in found for one in rank for s in one) == list(range(16))


def test_prime_s_packer(batch, monkeypatch):
    """The method that calls it, with the module around it left out: its configs take environments and their clients."""
    prime = real("prime_rl.trainer.batch")
    kinds = importlib.import_module("prime_rl.transports.rollouts.types")
    packing = types.ModuleType("packing")
    packing.prepare_batch = prime.prepare_batch
    pack = method_of(Path(prime.__file__).parents[1] / "orchestrator/packing.py", "pack", packing.__dict__)
    hook = switched_on("prime_rl.md")["switch_on"](packing, prime, seq_len=128, num_experts=EXPERTS)
    samples = []
    for s, n in enumerate(batch.num_tokens_S.tolist()):
        first, end = batch.cu_seqlens[s : s + 2]
        ids = np.zeros((n, LAYERS, TOP_K), np.uint8)
        ids[: end - first] = batch.routed_experts_TLK[first:end]
        routes = kinds.RoutedExperts(data=ids.tobytes(), shape=list(ids.shape), dtype="uint8")
        per_token = {"logprobs": [0.0] * n, "temperatures": [1.0] * n, "advantages": [1.0] * n}
        tokens = {"token_ids": [100 + s] * n, "mask": [True] * n}
        samples.append(kinds.TrainingSample(**tokens, **per_token, env_name="test", routed_experts=routes))
    packer = types.SimpleNamespace(seq_len=128, num_train_workers=2, pad_to_multiple_of=8, bin_cost=sum)
    workers = pack(packer, samples)
    planned = hook.schedules[0]
    assert planned.by_routing
    for rank, made in enumerate(workers):
        found = [sorted({token - 100 for token in one.input_ids if token >= 100}) for one in made]
        assert found == [sorted(s for s in cell if s >= 0) for cell in planned.rank(rank)]
        assert all(len(one.input_ids) % 8 == 0 and len(one.input_ids) <= 128 for one in made)
    packing.prepare_batch = prime.prepare_batch
    assert sum(len(made) for made in pack(packer, samples)) >= sum(len(made) for made in workers)
    assert len(hook.schedules) == 1, "switched off"
