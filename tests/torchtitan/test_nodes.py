"""The shipped GPU configs at their true size, without a GPU: names, shapes, meshes, layouts and memory.

Each is built on the meta device and sharded for every rank of a fake process group, see sharded.py.
"""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routepack.cli.main import app, main
from routepack.core.config import load
from routepack.core.errors import ConfigError
from routepack.core.plans import ExpertPlacement
from routepack.cost.models import CostModel
from routepack.torchtitan.launch.launch import check_world_size, experiment_of

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
QWEN, DEEPSEEK = str(CONFIGS / "qwen3_30b_a3b.yaml"), str(CONFIGS / "deepseek_v3_16b.yaml")
JOBS = {
    "qwen": (QWEN, [], 16),
    "qwen EP 16": (QWEN, ["topology.expert_parallel_degree=16"], 16),
    "qwen 256 ranks": (QWEN, ["topology.data_parallel_degree=256"], 256),
    "deepseek": (DEEPSEEK, [], 8),
    "deepseek 16 ranks": (DEEPSEEK, ["topology.data_parallel_degree=16"], 16),
}
DEGREES = {  # EP, and the ranks that share an EP block
    "qwen": (8, 2),
    "qwen EP 16": (16, 1),
    "qwen 256 ranks": (8, 32),
    "deepseek": (8, 1),
    "deepseek 16 ranks": (8, 2),
}


SHIPPED = ("qwen", "deepseek")
KEYS = [pytest.param(key, marks=() if key in SHIPPED else pytest.mark.slow) for key in JOBS]


class Built(dict):
    """For each job, the facts of some ranks: of one EP group, of some that share experts, of the first and the last."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, key):
        together = [name for name in JOBS if (name in SHIPPED) == (key in SHIPPED)]
        file = self.folder / f"{key}.pickle"
        jobs = [
            (name, *JOBS[name][:2], sorted({0, 3, ranks // 2 + 3, ranks - 1})) for name in together for ranks in JOBS[name][2:]
        ]
        file.write_bytes(pickle.dumps(jobs))
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "sharded.py"), str(file)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-4000:]
        self.update(pickle.loads(file.read_bytes()))
        return self[key]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Built(tmp_path_factory.mktemp("sharded"))


def qwen_shapes():
    """Qwen/Qwen3-30B-A3B, config.json: names as TorchTitan's, dimensions as published."""
    dim, heads, kv_heads, head_dim, experts, hidden, vocab = 2048, 32, 4, 128, 128, 768, 151_936
    shapes = {"tok_embeddings.weight": (vocab, dim), "lm_head.weight": (vocab, dim), "norm.weight": (dim,)}
    for layer in range(48):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "attention.qkv_linear.wqkv.weight": ((heads + 2 * kv_heads) * head_dim, dim),
                "attention.wo.weight": (dim, heads * head_dim),
                "attention.q_norm.weight": (head_dim,),
                "attention.k_norm.weight": (head_dim,),
                "attention_norm.weight": (dim,),
                "ffn_norm.weight": (dim,),
                "moe.router.gate.weight": (experts, dim),
                **expert_shapes(experts, hidden, dim),
            }.items()
        }
    return shapes


def deepseek_shapes():
    """deepseek-ai/DeepSeek-V2-Lite, config.json: names as TorchTitan's, dimensions as published."""
    dim, heads, kv_rank, nope, rope, value, vocab = 2048, 16, 512, 128, 64, 128, 102_400
    experts, hidden, shared, dense = 64, 1408, 2, 10_944
    shapes = {"tok_embeddings.weight": (vocab, dim), "lm_head.weight": (vocab, dim), "norm.weight": (dim,)}
    for layer in range(27):
        mlp = {
            **{f"moe.shared_experts.{name}": shape for name, shape in mlp_shapes(shared * hidden, dim).items()},
            "moe.router.gate.weight": (experts, dim),
            **expert_shapes(experts, hidden, dim),
        }
        if layer == 0:
            mlp = {f"feed_forward.{name}": shape for name, shape in mlp_shapes(dense, dim).items()}
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "attention.wq.weight": (heads * (nope + rope), dim),
                "attention.wkv_a.weight": (kv_rank + rope, dim),
                "attention.kv_norm.weight": (kv_rank,),
                "attention.wkv_b.weight": (heads * (nope + value), kv_rank),
                "attention.wo.weight": (dim, heads * value),
                "attention_norm.weight": (dim,),
                "ffn_norm.weight": (dim,),
                **mlp,
            }.items()
        }
    return shapes


def mlp_shapes(hidden, dim):
    return {"w1.weight": (hidden, dim), "w3.weight": (hidden, dim), "w2.weight": (dim, hidden)}


def expert_shapes(experts, hidden, dim):
    weights = {"w1_EFD": (experts, hidden, dim), "w3_EFD": (experts, hidden, dim), "w2_EDF": (experts, dim, hidden)}
    return {f"moe.routed_experts.inner_experts.{name}": shape for name, shape in weights.items()}


def published(key):
    return qwen_shapes() if key.startswith("qwen") else deepseek_shapes()


@pytest.mark.parametrize(("shapes", "total"), [(qwen_shapes(), 30_532_122_624), (deepseek_shapes(), 15_706_484_224)])
def test_the_published_dimensions_add_up_to_the_published_size(shapes, total):
    assert sum(map(math.prod, shapes.values())) == total


@pytest.mark.parametrize("key", KEYS)
def test_names_and_shapes_are_those_of_the_published_model(built, key):
    for facts in built[key].values():
        assert {name: one["shape"] for name, one in facts["parameters"].items()} == published(key)


@pytest.mark.parametrize("key", KEYS)
def test_no_parameter_takes_memory(built, key):
    assert {one["memory"] for facts in built[key].values() for one in facts["parameters"].values()} == {"meta"}


@pytest.mark.parametrize("key", KEYS)
def test_meshes_have_the_configs_degrees(built, key):
    ep, sharers = DEGREES[key]
    for facts in built[key].values():
        sizes = {"fsdp": ep * sharers, "batch": ep * sharers, "loss": ep * sharers, "ep": ep, "efsdp": sharers}
        assert facts["meshes"] == {name: size for name, size in sizes.items() if size > 1}


@pytest.mark.parametrize("key", KEYS)
def test_every_router_replays_and_every_layers_experts_are_placed_and_triton(built, key):
    layers = 48 if key.startswith("qwen") else 26
    for facts in built[key].values():
        assert facts["routers"] == ["ReplayRouter"] * layers
        assert facts["routed experts"] == ["PlacedRoutedExperts"] * layers
        assert facts["experts"] == {"TritonExperts"}
        assert facts["attention"] == {"EqualWidthAttention"}


@pytest.mark.parametrize("key", KEYS)
def test_a_rank_holds_whole_experts_while_there_are_enough_and_parts_of_them_beyond(built, key):
    ep, sharers = DEGREES[key]
    for rank, facts in built[key].items():
        for name, one in facts["parameters"].items():
            experts, *rest = one["shape"]
            if "inner_experts" not in name:
                assert one["mesh"] == {"fsdp": ep * sharers}
                chunk = -(-experts // (ep * sharers))
                assert one["local"] == (min(chunk, max(0, experts - rank * chunk)), *rest)
                continue
            whole = ep * sharers <= experts
            assert one["mesh"] == {"efsdp": sharers, "ep": ep}
            assert one["splits"] == [0 if whole else 1, 0]
            held = (experts // ep // sharers, *rest) if whole else (experts // ep, rest[0] // sharers, rest[1])
            assert one["local"] == held


@pytest.mark.parametrize("key", KEYS)
def test_ranks_agree_on_who_holds_which_slot(built, key):
    """What experts move by: every rank's view of the layout, and the EP ranks that the planner balances."""
    ep, sharers = DEGREES[key]
    num_experts = 128 if key.startswith("qwen") else 64
    whole = ep * sharers <= num_experts
    rank_of_E = ExpertPlacement.identity(1, num_experts).rank_of_LE(ep)[0]
    held = {}
    for rank, facts in built[key].items():
        for rows_of_rank, column_slices in facts["layouts"]:
            # Each slot is held once among the ranks that exchange its rows.
            assert sorted(np.concatenate(list(rows_of_rank.values())).tolist()) == list(range(num_experts))
            assert column_slices == (() if whole else ((1, sharers, rank // ep),))
            for other, rows in rows_of_rank.items():
                assert held.setdefault(other, rows).tolist() == rows.tolist()
                assert set(rank_of_E[rows]) == {other % ep}
            assert rank in rows_of_rank
            assert (
                len(rows_of_rank[rank]) == facts["parameters"]["layers.5.moe.routed_experts.inner_experts.w1_EFD"]["local"][0]
            )


@pytest.mark.parametrize("key", KEYS)
def test_the_estimate_is_what_the_fullest_rank_holds(built, key):
    config, overrides, num_ranks = JOBS[key]
    estimate = experiment_of(load([config], overrides)).memory()
    held = max(sum(math.prod(one["local"]) for one in facts["parameters"].values()) for facts in built[key].values())
    assert estimate.weights == 4 * held
    assert (estimate.gradients, estimate.optimizer) == (4 * held, 8 * held)
    assert {facts["rotary"] for facts in built[key].values()} == {estimate.rotary}
    assert (estimate.num_ranks, estimate.expert_parallel_degree) == (num_ranks, DEGREES[key][0])


@pytest.mark.parametrize(("config", "name"), [(QWEN, "qwen3_30b_a3b"), (DEEPSEEK, "deepseek_v2_lite")])
def test_the_cost_model_is_the_known_one_with_recomputing(config, name):
    cost_model, known = experiment_of(load([config])).planner.cost_model, CostModel.for_model(name, device="h200")
    assert cost_model.as_dict()["options"] == known.as_dict()["options"] | {"recompute": True}


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK])
def test_a_device_that_is_too_small_is_refused_with_what_to_lower(config):
    with pytest.raises(
        ConfigError, match=r"device_memory_gib=40 is too little: .*largest part is logits: lower packer.max_tok"
    ):
        experiment_of(load([config], ["launch.device_memory_gib=40"]))
    with pytest.raises(ConfigError, match=r"largest part is optimizer: use more ranks"):
        experiment_of(load([config], ["launch.device_memory_gib=20", "packer.max_tokens=4096"]))


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK])
def test_routepack_can_be_switched_off_by_the_overlay(config):
    planner = experiment_of(load([config, CONFIGS / "first_fit.yaml"])).planner
    assert type(planner.rerouter).__name__ == "IdentityRerouter"
    assert (type(planner.packer).__name__, planner.packer.max_tokens) == ("FirstFitPacker", 16_384)


def test_deepseeks_constants_are_the_published_ones():
    from torchtitan.models.common import RMSNorm

    model = experiment_of(load([DEEPSEEK])).model.model_spec().model
    assert {norm.eps for _, norm, _, _ in model.traverse(RMSNorm.Config)} == {1e-6}
    assert {layer.attention.mscale for layer in model.layers} == {0.707}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN, "rank of 16 at EP 8, counted, not measured: weights 7.1 GiB"),
        (DEEPSEEK, "rank of 8 at EP 8, counted, not measured: weights 7.3 GiB"),
    ],
)
def test_check_accepts_both_and_says_what_a_rank_takes(config, said, capsys):
    app(["check", config], standalone_mode=False)
    out, err = capsys.readouterr()
    assert said in err
    assert err.endswith("together.\nok\n")
    assert "data_parallel_degree" in out


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK])
def test_train_refuses_where_there_is_no_gpu_and_starts_nothing(config, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(lambda: app(["train", config, f"out={tmp_path / 'out'}"], prog_name="routepack"))
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("routepack: launch.device=cuda: every rank needs one")
    assert not (tmp_path / "out").exists()


def test_a_launcher_with_another_number_of_ranks_is_refused_with_the_line_to_use(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"data_parallel_degree=16 needs as many ranks; the launcher started 8: use torchrun"):
        check_world_size(experiment_of(load([QWEN])))
