"""The hooks beside the stacks' own code, where ROUTEPACK_STACKS names a folder with it.

Such a folder is made by ``pip install --no-deps --target FOLDER verl megatron-core`` (0.9.1 and 0.16.1 were tried), or by
copying a repository's package into it. Only single definitions are run, so nothing that a stack needs has to be there.
TorchTitan is a dependency: its batcher is always tried.
"""

import ast
import importlib
import inspect
import os
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from routepack.integrations.areal import ArealHook
from routepack.integrations.megatron import MegatronHook
from routepack.integrations.nemo_rl import NemoHook
from routepack.integrations.prime_rl import PrimeHook
from routepack.integrations.slime import SlimeHook
from routepack.integrations.torchtitan_rl import TorchTitanBatcherHook
from routepack.integrations.verl import VerlHook

LENGTHS = [30, 12, 7, 25, 18, 9, 14, 22, 5, 11, 28, 16]


def source_of(path):
    """The text of a stack's file; skips where it is not there."""
    folder = os.environ.get("ROUTEPACK_STACKS", "")
    for part in filter(None, folder.split(os.pathsep)):
        if (Path(part) / path).is_file():
            return (Path(part) / path).read_text()
    pytest.skip(f"no {path}: set ROUTEPACK_STACKS to folders that hold the stacks' packages")
    return None


def definition(path, *names):
    """The node of a function, or of a method of a class."""
    body = ast.parse(source_of(path)).body
    for name in names:
        found = [node for node in body if getattr(node, "name", None) == name]
        if not found:
            pytest.skip(f"{path} has no {'.'.join(names)}: another version of the stack")
        body = found[0].body
    return found[0]


def parameters(node):
    arguments = node.args
    return [one.arg for one in arguments.posonlyargs + arguments.args if one.arg != "self"], [
        one.arg for one in arguments.kwonlyargs
    ]


def run(path, *names, **others):
    """These definitions of a file, run by themselves."""
    scope = dict(others)
    for node in ast.parse(source_of(path)).body:
        if getattr(node, "name", None) in names:
            code = ast.unparse(node)
            exec(compile(f"from __future__ import annotations\n{code}", path, "exec"), scope)
    missing = [name for name in names if name not in scope]
    if missing:
        pytest.skip(f"{path} has no {missing[0]}: another version of the stack")
    return scope


def own_parameters(function):
    given = list(inspect.signature(function).parameters.values())
    return [p.name for p in given if p.kind == p.POSITIONAL_OR_KEYWORD and p.name != "self"], [
        p.name for p in given if p.kind == p.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("stack", ["slime", "miles"])
def test_build_dp_schedule_is_called_as_the_stack_s_own(stack):
    assert own_parameters(SlimeHook.__call__) == parameters(definition(f"{stack}/utils/dp_schedule.py", "build_dp_schedule"))


@pytest.mark.parametrize("stack", ["slime", "miles"])
def test_build_dp_schedule_gives_what_the_stack_s_own_gives(stack):
    path = f"{stack}/utils/seqlen_balancing.py"
    packed = "first_fit_pack" if stack == "slime" else "first_fit_decreasing_pack"
    tree = ast.parse(source_of(path))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    import copy
    import heapq
    import logging

    tools = run(path, *names, copy=copy, heapq=heapq)
    helpers = {name: tools[name] for name in (packed, "expand_bins_by_splitting", "get_seqlen_balanced_partitions")}
    path = f"{stack}/utils/dp_schedule.py"
    names = [node.name for node in ast.parse(source_of(path)).body if isinstance(node, ast.FunctionDef)]
    helpers |= {"logger": logging.getLogger(), "calculate_fwd_flops": lambda lengths, args: sum(n * n for n in lengths)}
    own = run(path, *names, **helpers)["build_dp_schedule"]
    args = types.SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=40, balance_data=True, balance_by_flops=False, micro_batch_size=None
    )
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    asked = {"global_batch_size": 5, "rollout_indices": [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]}
    theirs, ours = own(args, config, LENGTHS, **asked), SlimeHook()(args, config, LENGTHS, **asked)
    for partitions, microbatches, counts, rollouts in (theirs, ours):
        assert sorted(s for partition in partitions for s in partition) == list(range(12))
        assert [len(one) for one in microbatches] == [sum(counts)] * 2
        assert rollouts == [5, 5]
    assert ours[2] <= theirs[2]


def test_megatron_s_method_is_called_as_its_own():
    path = "megatron/core/datasets/data_schedule.py"
    own, _ = parameters(definition(path, "DpBalancedScheduler", "get_groups_and_subsamples"))
    assert own == own_parameters(MegatronHook.get_groups_and_subsamples)[0][: len(own)]


def test_megatron_s_hybrid_scheduler_also_passes_its_config():
    path = "megatron/core/pipeline_parallel/hybrid_cp_schedule.py"
    own, _ = parameters(definition(path, "BalancedCPScheduler", "get_groups_and_subsamples"))
    assert own == own_parameters(MegatronHook.get_groups_and_subsamples)[0]


def test_megatron_s_scheduler_gives_the_same_shape_and_an_empty_first_microbatch():
    path = "megatron/core/datasets/data_schedule.py"
    definition(path, "DpBalancedScheduler")
    from typing import Any, Optional

    scope = run(path, "BasePackingScheduler", "DpBalancedScheduler", Optional=Optional, Any=Any)
    figures = {"max_seqlen_per_dp_cp_rank": 20, "cp_size": 2, "dp_size": 2, "microbatch_group_size_per_vp_stage": None}
    own = scope["DpBalancedScheduler"](**figures)
    samples = list(enumerate(LENGTHS))
    theirs, ours = own.get_groups_and_subsamples(samples), MegatronHook(**figures).get_groups_and_subsamples(samples)
    for groups in (theirs, ours):
        assert {len(group) for group in groups} == {4}
        assert sorted(i for group in groups for rank in group[::2] for i in rank) == list(range(12))
    assert len(ours) <= len(theirs)
    assert own.get_groups_and_subsamples([(0, 41), *((i, 20) for i in range(1, 8))])[0][0] == []


def test_nemo_s_packer_takes_the_hook_s_bins_as_they_are(monkeypatch):
    path = "nemo_rl/data/packing/algorithms.py"
    source = source_of(path)
    module = types.ModuleType("nemo_rl_packing")
    # Enums and dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, path, "exec"), module.__dict__)
    hook = NemoHook()

    class Planned(module.SequencePacker):
        def _pack_implementation(self, sequence_lengths):
            return hook.pack(
                sequence_lengths,
                self.bin_capacity,
                min_bin_count=self.min_bin_count,
                bin_count_multiple=self.bin_count_multiple,
            )

    planned = Planned(40, min_bin_count=3, bin_count_multiple=3)
    bins = planned.pack(LENGTHS)
    assert bins == hook.schedules[0].cells()
    own = module.get_packer("first_fit_decreasing", 40, min_bin_count=3, bin_count_multiple=3).pack(LENGTHS)
    assert len(bins) <= len(own)


def test_nemo_s_shards_are_asked_for_as_its_own():
    node = definition("nemo_rl/distributed/batched_data_dict.py", "BatchedDataDict", "shard_by_batch_size")
    assert own_parameters(NemoHook.shard_by_batch_size)[0][1:] == parameters(node)[0][:2]


@pytest.mark.parametrize("name", ["ffd_allocate", "kk_allocate"])
def test_areal_s_functions_are_called_as_their_own(name):
    own, _ = parameters(definition("areal/utils/seqpack.py", name))
    assert own_parameters(ArealHook.__call__)[0] == own[:4]


def test_areal_s_kk_breaks_its_divisor_and_the_hook_does_not():
    import bisect
    import heapq
    import logging
    import math

    names = ("kk_allocate", "_kk_partition", "_KKState", "_KKSet", "ffd_allocate", "_ffd_allocate")
    tools = {"np": np, "bisect": bisect, "heapq": heapq, "math": math, "logger": logging.getLogger()}
    scope = run("areal/utils/seqpack.py", *names, **tools)
    values = [5, 5, 5, 4, 4]
    assert len(scope["kk_allocate"](values, 10, 1, 4)) % 4 == 0
    assert len(scope["kk_allocate"]([9, 9, 9, 9, 9], 10, 1, 4)) == 5, "this version keeps its divisor"
    assert len(ArealHook()(values, 10, 1, 4)) == len(scope["ffd_allocate"](values, 10, 1, 4)) == 4


def test_verl_s_options_are_those_of_its_own():
    own, _ = parameters(definition("verl/workers/engine/utils.py", "prepare_micro_batches"))
    assert {"num_batches_divided_by", "min_num_micro_batch"} <= set(own)
    assert {"num_batches_divided_by", "min_num_micro_batch"} <= set(own_parameters(VerlHook.prepare_micro_batches)[1])


def test_verl_s_balanced_microbatches_exceed_the_cap_and_the_hook_s_do_not():
    import copy
    import heapq
    import math

    path = "verl/utils/seqlen_balancing.py"
    own = run(path, "karmarkar_karp", "get_seqlen_balanced_partitions", copy=copy, heapq=heapq, math=math)
    lengths, cap = [7] * 8, 8
    theirs = own["get_seqlen_balanced_partitions"](lengths, k_partitions=7, equal_size=False)
    assert max(sum(lengths[i] for i in one) for one in theirs) == 14
    ours = VerlHook().prepare_micro_batches(lengths, max_token_len=cap)
    assert max(sum(lengths[i] for i in one) for one in ours) <= cap


def test_verl_s_partitions_have_the_shape_of_its_own():
    import copy
    import heapq

    path = "verl/utils/seqlen_balancing.py"
    own = run(path, "karmarkar_karp", "get_seqlen_balanced_partitions", copy=copy, heapq=heapq)
    theirs = own["get_seqlen_balanced_partitions"](LENGTHS, k_partitions=3, equal_size=True)
    ours = VerlHook().balance_batch(LENGTHS, 3, max_token_len=100).partitions
    for partitions in (theirs, ours):
        assert [len(one) for one in partitions] == [4, 4, 4]
        assert sorted(s for one in partitions for s in one) == list(range(12))


def test_prime_s_batch_is_asked_for_as_its_own():
    node = definition("prime_rl/trainer/batch.py", "prepare_batch")
    assert own_parameters(PrimeHook.prepare_batch) == parameters(node)


@pytest.fixture
def titan(monkeypatch):
    """TorchTitan's batcher, without the package around it, which imports vLLM."""
    importlib.import_module("routepack.torchtitan")  # chooses the device

    root = Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0]) / "experiments" / "rl"
    before = set(sys.modules)
    package = types.ModuleType("torchtitan.experiments.rl")
    package.__path__ = [str(root)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    yield importlib.import_module("torchtitan.experiments.rl.components.batcher")
    for name in set(sys.modules) - before:
        if name.startswith("torchtitan.experiments.rl"):
            del sys.modules[name]


def titan_group(titan, lengths):
    kinds = importlib.import_module("torchtitan.experiments.rl.types")
    samples = [
        kinds.TrainingSample(
            min_policy_version=0,
            max_policy_version=0,
            rollout_id=kinds.RolloutTurnID(group_id=0, rollout_id=s, turn_id=0),
            token_ids=[100 + s] * (length + 1),
            loss_mask=[False] + [True] * length,
            logprobs=[0.0] * (length + 1),
            advantage=[1.0] * (length + 1),
        )
        for s, length in enumerate(lengths)
    ]
    return kinds.TrainingSampleGroup(group_id=0, training_samples=samples, metrics=[])


def grid_of(titan, lengths, *, hook=None, rows=2, ranks=2, seq_len=40):
    batcher = titan.Batcher.Config(batch=titan.BatchConfig(local_batch_size=rows, seq_len=seq_len)).build(
        num_prompts_per_train_step=1, dp_degree=ranks, pad_id=0
    )
    if hook:
        batcher._assign_training_samples_to_rows = lambda samples: hook.assign_training_samples_to_rows(batcher, samples)
    return batcher.add_training_samples(training_sample_group=titan_group(titan, lengths))


def test_torchtitan_s_batcher_gives_each_rank_what_was_planned(titan):
    hook = TorchTitanBatcherHook()
    batch = grid_of(titan, LENGTHS, hook=hook)
    planned = hook.schedules[0]
    for rank in range(2):
        rows = [row[row > 0].tolist() for microbatch in batch.microbatches for row in microbatch[rank].token_ids]
        found = sorted(sorted({token - 100 for token in row}) for row in rows if row)
        assert found == sorted(sorted(cell) for cell in planned.rank(rank) if cell != [-1])
    tokens = sum(int((m.token_ids > 0).sum()) for row in batch.microbatches for m in row)
    assert tokens == sum(LENGTHS)
    assert len(batch.microbatches) <= len(grid_of(titan, LENGTHS).microbatches)


def test_torchtitan_s_batcher_takes_windows_of_any_size(titan):
    rng = random.Random(0)
    for _ in range(10):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 20))]
        batch = grid_of(titan, lengths, hook=TorchTitanBatcherHook(), rows=rng.randint(1, 3), ranks=rng.randint(1, 3))
        assert sum(int((m.token_ids > 0).sum()) for row in batch.microbatches for m in row) == sum(lengths)
