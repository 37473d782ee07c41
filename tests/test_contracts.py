"""What somebody who subclasses a component, or names one in a config, can rely on."""

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from routepack.planning.plan_files import load_plan, save_plan

import routepack as rp
from routepack.components.expert_rerouter import SwapSearch
from routepack.components.placement_search import PackedUnits, PlacementSearch
from routepack.core.component import Limits
from routepack.core.config import build, load
from routepack.planning.from_config import build_planner

FIRST_FIT = "routepack.FirstFitPacker"
TOPOLOGY = rp.Topology(data_parallel_degree=2, expert_parallel_degree=2)


def window_of(num_sequences: int, seed: int = 0) -> rp.RoutingDemand:
    return rp.testing.synthetic_demand(num_sequences=num_sequences, max_length=64, num_experts=8, seed=seed)


class Calls:
    """Counts calls, and how many ran at once."""

    def __init__(self) -> None:
        self.total = self.running = self.most_at_once = 0
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self.total += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        time.sleep(0.002)

    def __exit__(self, *_):
        with self._lock:
            self.running -= 1


@dataclass(frozen=True, kw_only=True)
class CountedPacker(rp.AttentionAwarePacker):
    """Searches as its base class does, and counts."""

    calls: Any = field(default_factory=Calls)

    def assign(self, problem):
        with self.calls:
            return super().assign(problem)


@dataclass(frozen=True, kw_only=True)
class ThreadSafePacker(CountedPacker):
    """Says that its calls may overlap."""

    thread_safe: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CountedSearch(SwapSearch):
    """Swaps as its base class does, and counts."""

    calls: Any

    def refine(self, slots_LP, units):
        with self.calls:
            return super().refine(slots_LP, units)

    def anneal(self, slots_LP, units, *, temperature, seed, effort):
        with self.calls:
            return super().anneal(slots_LP, units, temperature=temperature, seed=seed, effort=effort)


@dataclass(frozen=True, kw_only=True)
class CountedRerouter(rp.ExpertRerouter):
    """An ExpertRerouter with a counted search."""

    calls: Any = field(default_factory=Calls)

    def search(self):
        return CountedSearch(sweeps=2, swaps_per_layer=100, calls=self.calls)


@dataclass(frozen=True, kw_only=True)
class Unfair(rp.Packer):
    """Legal, but poor: rank 0 gets the longest sequences, as many as its cells hold."""

    def assign(self, problem):
        ranks = problem.topology.data_parallel_degree
        order_S = np.argsort(-problem.length_S, kind="stable")
        cells = np.argsort(np.arange(problem.num_cells) % ranks, kind="stable")
        cell_of_S, room_C = np.full(len(order_S), -1), np.full(problem.num_cells, self.max_tokens)
        # Every cell gets one of the shortest, so that none is empty.
        cell_of_S[order_S[-problem.num_cells :]] = cells
        np.subtract.at(room_C, cells, problem.length_S[order_S[-problem.num_cells :]])
        for s in order_S[: -problem.num_cells]:
            fits = [cell for cell in cells if room_C[cell] >= problem.length_S[s]]
            cell_of_S[s] = fits[0] if fits else -1
            room_C[cell_of_S[s]] -= problem.length_S[s] if fits else 0
        return cell_of_S


@dataclass(frozen=True, kw_only=True)
class Patient(rp.Packer):
    """Hands over to the packer inside it, and has an option and a check of its own."""

    inner: rp.Packer
    patience: Annotated[int, Limits(least=1)] = 1
    others: tuple[rp.Packer, ...] = ()

    def __post_init__(self):
        pass  # Without super(), on purpose.

    def assign(self, problem):
        return self.inner.assign(problem)


# --- own code is always asked, and never by two threads at once unless it says that it may be


@pytest.mark.parametrize("num_sequences", [6, 100, 600])
def test_the_code_of_a_subclass_is_always_asked(num_sequences):
    packer, rerouter = CountedPacker(max_tokens=256), CountedRerouter()
    rp.Planner(topology=TOPOLOGY, packer=packer, rerouter=rerouter, num_proposals=200 * num_sequences).plan(
        window_of(num_sequences)
    )
    assert packer.calls.total > 0
    assert rerouter.calls.total > 0


@pytest.mark.parametrize("budget", [{"num_proposals": 200_000}, {"time_limit_seconds": 0.5}], ids=["count", "clock"])
def test_calls_do_not_overlap_unless_the_class_says_so(budget):
    packer, rerouter = CountedPacker(max_tokens=256), CountedRerouter()
    rp.Planner(topology=TOPOLOGY, packer=packer, rerouter=rerouter, **budget).plan(window_of(100))
    assert packer.calls.most_at_once == 1
    assert rerouter.calls.most_at_once == 1


def test_calls_of_a_class_that_says_so_overlap():
    packer = ThreadSafePacker(max_tokens=256)
    rp.Planner(topology=TOPOLOGY, packer=packer, num_proposals=200_000).plan(window_of(100))
    assert packer.calls.most_at_once > 1


def test_one_chain_after_another_finds_what_chains_at_once_find():
    plans = [
        rp.Planner(topology=TOPOLOGY, packer=kind(max_tokens=256), num_proposals=200_000).plan(window_of(100))
        for kind in (CountedPacker, ThreadSafePacker, rp.AttentionAwarePacker)
    ]
    assert len({plan.packing.cell_of_S.tobytes() + plan.placement.physical_to_logical_LP.tobytes() for plan in plans}) == 1


# --- a plan says whose packing and placement it is


def test_a_plan_says_who_packed_and_placed_it(tmp_path):
    plan = rp.Planner(topology=TOPOLOGY, packer=rp.AttentionAwarePacker(max_tokens=256)).plan(window_of(40))
    assert plan.packer.name.endswith(".AttentionAwarePacker")
    assert plan.packer.options["max_tokens"] == 256
    assert plan.packer.instead_of == ""
    assert plan.rerouter.name.endswith(".ExpertRerouter")
    assert plan.rerouter.options == {"sweeps": 8, "swaps_per_layer": 16000}
    save_plan(plan, tmp_path / "plan.safetensors")
    again = load_plan(tmp_path / "plan.safetensors")
    assert (again.packer, again.rerouter) == (plan.packer, plan.rerouter)
    assert again.content_digest() == plan.digest


def test_a_poor_packer_is_told_that_the_baseline_was_taken_and_why(tmp_path):
    plan = rp.Planner(topology=TOPOLOGY, packer=Unfair(max_tokens=256), rerouter=rp.IdentityRerouter()).plan(window_of(60))
    assert plan.packer.name.endswith(".FirstFitPacker")
    assert plan.packer.instead_of.endswith(".Unfair")
    assert f"this one {plan.value:.4f}" in plan.packer.why
    assert str(plan.packer).startswith("FirstFitPacker instead of Unfair: its plans reach ")
    save_plan(plan, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors").packer == plan.packer


def test_a_component_inside_another_is_recorded_with_its_class():
    packer = Patient(max_tokens=256, inner=rp.TokenLPTPacker(max_tokens=256))
    plan = rp.Planner(topology=TOPOLOGY, packer=packer, rerouter=rp.IdentityRerouter()).plan(window_of(60))
    assert plan.packer.name.endswith(".Patient")
    assert plan.packer.options["inner"]["_target_"].endswith(".TokenLPTPacker")


# --- options are checked, whatever a subclass does


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -5}, r"packer\.max_tokens=-5 must be a whole number of at least 1"),
        ({"max_tokens": 2.5}, r"packer\.max_tokens=2\.5 must be a whole number"),
        ({"patience": 0}, r"packer\.patience=0 must be a whole number of at least 1"),
        ({"inner": 3}, r"packer\.inner=3 is a int; give a Packer"),
        ({"sequence_skew": 1}, r"packer\.sequence_skew=1 loosens packer\.equal_sequences"),
    ],
)
def test_a_subclass_that_does_not_call_super_is_checked(options, message):
    good = {"max_tokens": 64, "inner": rp.FirstFitPacker(max_tokens=64)}
    Patient(**good)
    with pytest.raises(rp.ConfigError, match=message):
        Patient(**good | options)


def test_a_new_option_of_a_class_that_is_no_dataclass_is_explained():
    class Undecorated(rp.FirstFitPacker):
        """Its author forgot a line."""

        slack: int = 3

    for make in (lambda: Undecorated(max_tokens=64), lambda: Undecorated(max_tokens=64, slack=4)):
        with pytest.raises(rp.ConfigError, match=r"Undecorated adds slack and is no dataclass.*write @dataclass"):
            make()


@dataclass(frozen=True, kw_only=True)
class Parent(rp.FirstFitPacker):
    """For the class below."""


class Forgetful(Parent):
    """Named in a config by a test."""

    slack: int = 3


def test_a_config_explains_it_too():
    config = load([], [f"packer={{_target_: {__name__}.Forgetful, max_tokens: 64, slack: 4}}"])
    with pytest.raises(rp.ConfigError, match=r"Forgetful adds slack and is no dataclass.*write @dataclass"):
        build(config, "packer", base=rp.Packer)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (rp.Packer, "pack"),
        (rp.Packer, "certify"),
        (rp.Rerouter, "place"),
        (rp.MovePolicy, "moves"),
        *((PlacementSearch, name) for name in ("refined", "annealed", "gathered", "brought_near")),
    ],
)
def test_a_final_method_cannot_be_overridden(base, name):
    with pytest.raises(TypeError, match=f"Own.{name} must not be overridden"):
        type("Own", (base,), {name: lambda self: None})


def test_what_a_search_gives_is_checked():
    @dataclass(frozen=True, kw_only=True)
    class Loses(PlacementSearch):
        """Puts expert 0 everywhere."""

        def refine(self, slots_LP, units):
            return np.zeros_like(slots_LP)

    demand = window_of(8)
    placement = rp.ExpertPlacement.identity(demand.num_layers, demand.num_experts)
    with pytest.raises(rp.PlanError, match="Loses: placement of layer 0 is not a permutation"):
        Loses().refined(placement, PackedUnits(demand=demand, unit_of_S=np.zeros(8, dtype=int), num_ranks=2))


# --- components compose in a config, at any depth

NESTED = f"""
topology: {{data_parallel_degree: 2, expert_parallel_degree: 2}}
packer:
  _target_: {__name__}.Patient
  max_tokens: 256
  inner:
    _target_: {__name__}.Patient
    max_tokens: 256
    patience: 3
    inner: {{_target_: routepack.KarmarkarKarpPacker, max_tokens: 256, equal_counts: false}}
    others:
      - {{_target_: routepack.FirstFitPacker, max_tokens: 128}}
      - {{_target_: routepack.TokenLPTPacker, max_tokens: 256}}
cost_model: {{_target_: routepack.CostModel.for_model, name: qwen3_30b_a3b, device: h100}}
"""


def config_of(tmp_path, *overrides: str):
    path = tmp_path / "plan.yaml"
    path.write_text(NESTED)
    return load([path], overrides)


def test_components_nest_in_a_config(tmp_path):
    planner = build_planner(config_of(tmp_path, "packer.inner.inner.max_tokens=512"))
    innermost = planner.packer.inner.inner
    assert innermost == rp.KarmarkarKarpPacker(max_tokens=512, equal_counts=False)
    assert planner.packer.inner.others == (rp.FirstFitPacker(max_tokens=128), rp.TokenLPTPacker(max_tokens=256))
    assert planner.cost_model == rp.CostModel.for_model("qwen3_30b_a3b", device="h100")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("packer.inner.inner.max_tokens=0", r"packer\.inner\.inner\.max_tokens=0 must be a whole number of at least 1"),
        ("packer.inner.inner.max_tokens=many", r"packer\.inner\.inner\.max_tokens='many': .*a whole number is needed"),
        ("packer.inner.inner.cap=3", r"packer\.inner\.inner\.cap is no option of KarmarkarKarpPacker"),
        ("packer.inner.patience=0", r"packer\.inner\.patience=0 must be a whole number of at least 1"),
        ("packer.inner.inner._target_=routepack.ExpertRerouter", r"packer\.inner\.inner\._target_=.* is not a Packer"),
        ("packer.inner.inner._target_=routepack.Packer", r"packer\.inner\.inner\._target_=.* is abstract"),
        (
            "packer.inner.others=[{_target_: routepack.FirstFitPacker, max_tokens: 0}]",
            r"packer\.inner\.others\[0\]\.max_tokens=0",
        ),
        ("cost_model.name=unheard_of", r"model 'unheard_of' is not known: choose qwen3_30b_a3b"),
        ("cost_model.nam=x", r"cost_model\.nam is no option of for_model: did you mean name\?"),
    ],
)
def test_errors_name_the_whole_path(tmp_path, override, message):
    with pytest.raises(rp.ConfigError, match=message):
        build_planner(config_of(tmp_path, override))


def test_a_component_that_is_abstract_must_be_named(tmp_path):
    config = load([], [f"packer={{_target_: {__name__}.Patient, max_tokens: 64, inner: {{max_tokens: 64}}}}"])
    with pytest.raises(rp.ConfigError, match=r"packer\.inner must say in packer\.inner\._target_ which Packer it is"):
        build(config, "packer", base=rp.Packer)


def test_the_moe_layer_can_be_named_in_a_config():
    from torch import nn

    config = load([], ["moe={_target_: routepack.PermutedMoE, dim: 16, hidden_dim: 32, num_experts: 4, top_k: 2}"])
    layer = build(config, "moe", base=nn.Module)
    assert isinstance(layer, rp.PermutedMoE)
    assert layer.top_k == 2
    with pytest.raises(rp.ConfigError, match=r"moe\.top_p is no option of PermutedMoE: did you mean top_k\?"):
        build(load([], ["moe={_target_: routepack.PermutedMoE, dim: 16, top_p: 2}"]), "moe", base=nn.Module)
