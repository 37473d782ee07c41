"""Routes recorded live, on routers of several kinds, against a recount of what they chose."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import routepack as rp
from routepack.core.errors import ConfigError, TraceError
from routepack.integrations.live import LiveRoutes, bind_routers, ids_from_logits

E, K, D = 8, 2, 4


class Router(nn.Module):
    """Gives its choice as the routers of current Hugging Face models do: logits, weights, ids [tokens, K]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        logits = x.reshape(-1, D) @ self.weight.T
        weights, ids = logits.softmax(-1).topk(K)
        return logits, weights, ids


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        _, weights, _ = self.router(x)
        return x + self.mix(x) * weights.sum(-1).reshape(*x.shape[:-1], 1)


class Model(nn.Module):
    """Layer 0 is dense, and the router of layer 3 comes before that of layer 1 among the modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"3": Block(), "1": Block()})

    def forward(self, x):
        return self.layers["3"](self.layers["1"](x))

    def chosen(self, x):
        """int [tokens, L, K], layers ascending, by another way than hooks."""
        first = self.layers["1"].router(x)[2]
        return torch.stack([first, self.layers["3"].router(self.layers["1"](x))[2]], dim=1).numpy()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def live_of(model, **options):
    return LiveRoutes(model, **{"routers": Router, "num_experts": E, "top_k": K} | options)


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), padding=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_recorded_rows_are_the_choices_of_each_sequence(counts, padding, seed):
    torch.manual_seed(seed)
    model, x = Model(), torch.randn(sum(counts) + padding, D)
    sequences = np.random.default_rng(seed).permutation(len(counts)).tolist()
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch(counts, sequences=sequences):
            model(x)
        lengths = np.zeros(len(counts), dtype=int)
        lengths[sequences] = counts
        batch = live.batch(num_tokens_S=np.maximum(lengths, 1))
        expected = np.split(model.chosen(x)[: sum(counts)], np.cumsum(counts)[:-1])
    for own, sequence in zip(expected, sequences, strict=True):
        assert np.array_equal(batch.routed_experts_of(sequence), own)
    assert batch.layer_ids_L.tolist() == [1, 3]
    assert batch.routed_experts_TLK.dtype == np.uint8


def test_demand_equals_a_recount(model):
    x, counts = torch.randn(9, D), [4, 5]
    collector = rp.RoutingDemandCollector(num_experts=E)
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch(counts):
            model(x)
        live.count_into(collector, num_tokens_S=counts)
        assert live.num_bytes == 0
        ids = model.chosen(x)
    recount = np.zeros((2, 2, E), dtype=int)
    for t, row in enumerate(ids):
        for layer, chosen in enumerate(row):
            recount[int(t >= 4), layer, chosen] += 1
    assert np.array_equal(collector.demand().tokens_SLE, recount)


@pytest.mark.parametrize("left", [False, True], ids=["padded at the end", "padded in front"])
def test_padding_is_left_out_wherever_it_is(model, left):
    counts, width = [3, 5, 1], 6
    x = torch.randn(3, width, D)
    starts = [b * width + (width - n if left else 0) for b, n in enumerate(counts)]
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch(counts, starts=starts):
            model(x)
        batch = live.batch(num_tokens_S=counts)
        chosen = model.chosen(x)
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert np.array_equal(batch.routed_experts_of(sequence), chosen[start : start + count])


def test_sampling_token_by_token_appends_rows(model):
    """Sequence 1 ends early; what was fed in one at a time is what a whole forward of these per-token layers gives."""
    x = torch.randn(2, 4, D)
    with torch.no_grad(), live_of(model) as live:
        for step in range(4):
            alive = [0, 1] if step < 2 else [0]
            with live.microbatch([1] * len(alive), sequences=alive):
                model(x[alive, step])
        batch = live.batch(num_tokens_S=[5, 3])
        chosen = model.chosen(x).reshape(2, 4, 2, K)
    assert np.array_equal(batch.routed_experts_of(0), chosen[0])
    assert np.array_equal(batch.routed_experts_of(1), chosen[1, :2])


@pytest.mark.parametrize("routers", [Router, (Router, nn.Bilinear), "layers.*.router", "mapping"], ids=str)
def test_routers_are_found_by_type_name_or_layer(model, routers):
    if routers == "mapping":
        routers = {3: model.layers["3"].router, 1: model.layers["1"].router}
    bound = bind_routers(model, routers)
    assert {layer: name for layer, (name, _) in bound.items()} == {1: "layers.1.router", 3: "layers.3.router"}


def test_a_gate_that_gives_logits_is_recorded_by_its_largest():
    gate, x = nn.Linear(D, E), torch.randn(5, D)
    model = nn.ModuleDict({"layers": nn.ModuleList([gate])})
    with torch.no_grad(), LiveRoutes(model, "layers.*", num_experts=E, top_k=K, ids_of=ids_from_logits) as live:
        with live.microbatch([5]):
            gate(x)
        rows = live.batch(num_tokens_S=[5]).routed_experts_TLK
    assert np.array_equal(np.sort(rows[:, 0]), np.sort(np.argsort(-gate(x).detach().numpy())[:, :K]))


def test_an_output_without_ids_is_refused_by_name_of_the_remedy():
    gate = nn.Linear(D, E)
    with LiveRoutes(nn.ModuleList([gate]), nn.Linear, num_experts=E, top_k=K) as live:  # noqa: SIM117
        with pytest.raises(ConfigError, match="ids_of="), live.microbatch([5]):
            gate(torch.randn(5, D))


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (300, "int16"), (40_000, "int32")])
def test_ids_travel_in_the_narrowest_dtype_that_holds_every_expert(num_experts, dtype):
    gate = nn.Identity()
    chosen = torch.tensor([[0, num_experts - 1], [num_experts - 1, 1], [2, 0]])
    with LiveRoutes(nn.ModuleList([gate]), nn.Identity, num_experts=num_experts, top_k=2) as live:
        with live.microbatch([3]):
            gate(chosen)
        assert live.num_bytes == 3 * (2 * np.dtype(dtype).itemsize + 1)
        rows = live.batch(num_tokens_S=[3]).routed_experts_TLK
    assert (rows.dtype, rows[:, 0].tolist()) == (np.dtype(dtype), chosen.tolist())


# Bound by module and layer.


def test_a_draft_layer_that_shares_a_number_is_refused(model):
    model.mtp = nn.ModuleDict({"1": Block()})
    with pytest.raises(ConfigError, match=r"layers\.1\.router and mtp\.1\.router claim one layer \(1\)"):
        live_of(model)
    assert bind_routers(model, "layers.*.router").keys() == {1, 3}


def test_an_orphan_of_a_model_built_twice_is_refused(model):
    """verl#7340."""
    with pytest.raises(ConfigError, match="layer 3 is no module of this model"):
        live_of(model, routers={1: model.layers["1"].router, 3: Model().layers["3"].router})


def test_one_module_cannot_be_two_layers(model):
    with pytest.raises(ConfigError, match="are one module"):
        live_of(model, routers={1: model.layers["1"].router, 3: model.layers["1"].router})


def test_a_layer_that_the_name_does_not_tell_is_asked_for(model):
    with pytest.raises(ConfigError, match="has 0 numbers"):
        live_of(model.layers["1"])


def test_no_router_is_an_error(model):
    with pytest.raises(ConfigError, match="matches no module of Model"):
        live_of(model, routers=nn.Bilinear)


def test_a_router_that_is_not_called_is_an_error(model):
    with live_of(model) as live:
        with (
            pytest.raises(ConfigError, match=r"layers\.3\.router was not called in this microbatch \(1 of 2"),
            live.microbatch([5]),
        ):
            model.layers["1"](torch.randn(5, D))
        assert live.num_bytes == 0


def test_a_router_called_twice_is_an_error(model):
    x = torch.randn(5, D)
    with live_of(model) as live, pytest.raises(ConfigError, match="called twice"), live.microbatch([5]):  # noqa: PT012
        model(x)
        model(x)


def test_a_forward_outside_a_microbatch_is_not_recorded(model):
    x = torch.randn(5, D)
    with live_of(model) as live:
        with live.microbatch([5]):
            out = model(x)
        model(x)
        out.sum().backward()
        assert len(live.batch(num_tokens_S=[5]).routed_experts_TLK) == 5


def test_recomputed_forwards_of_a_backward_pass_are_not_counted(model):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(5, D, requires_grad=True)
    with live_of(model) as live:
        with live.microbatch([5]):
            out = checkpoint(model, x, use_reentrant=False)
        out.sum().backward()
        assert np.array_equal(live.batch(num_tokens_S=[5]).routed_experts_TLK, model.chosen(x.detach()))


# Memory.


def test_the_bound_holds_to_the_byte(model):
    needed = 5 * (2 * K + 1)
    with torch.no_grad():
        with live_of(model, max_bytes=needed) as live, live.microbatch([5]):
            model(torch.randn(5, D))
        with live_of(model, max_bytes=needed - 1) as live:  # noqa: SIM117
            with (
                pytest.raises(ConfigError, match=rf"max_bytes={needed - 1} is too little.* to {needed}\. Raise it"),
                live.microbatch([5]),
            ):
                pytest.fail("the forward ran")


def test_the_bound_counts_all_that_is_recorded_and_is_free_again_after_it_is_taken(model):
    with torch.no_grad(), live_of(model, max_bytes=60) as live:
        for _ in range(2):
            with live.microbatch([5]):
                model(torch.randn(5, D))
            with pytest.raises(ConfigError, match="25 bytes of ids are recorded"), live.microbatch([8]):
                model(torch.randn(8, D))
            assert live.num_bytes == 25
            live.batch(num_tokens_S=[5])


def test_recorded_bytes_are_what_the_tensors_hold(model):
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch([5]):
            model(torch.randn(7, D))
        assert [one.flat.untyped_storage().nbytes() for one in live._recorded] == [live.num_bytes]


@pytest.mark.parametrize("where", ["inside the microbatch", "between microbatches"])
def test_an_exception_frees_everything_and_takes_the_hooks_off(model, where):
    kept = []

    def run():
        with live_of(model) as live, torch.no_grad():
            with live.microbatch([5]):
                model(torch.randn(5, D))
            kept.extend(weakref.ref(one.flat) for one in live._recorded)
            if where == "between microbatches":
                raise RuntimeError
            with live.microbatch([3]):
                model(torch.randn(3, D))
                kept.append(weakref.ref(live._open.flat))
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_microbatch_that_fails_leaves_the_others(model):
    x = torch.randn(5, D)
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch([5]):
            model(x)
        with pytest.raises(RuntimeError), live.microbatch([5]):  # noqa: PT012
            model.layers["1"](x)
            raise RuntimeError
        assert np.array_equal(live.batch(num_tokens_S=[5]).routed_experts_TLK, model.chosen(x))


# What is wrong in the numbers.


class Physical(Router):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights, ids + torch.where(torch.arange(len(ids))[:, None] == 3, 256, 0)


def test_an_id_that_narrowing_would_fold_is_found_and_named(model):
    model.layers["3"].router.__class__ = Physical
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch([2, 3]):
            model(torch.randn(5, D))
        with pytest.raises(TraceError, match=r"sequence 1, row 1: a router chose an id outside 0 \.\. 7"):
            live.batch(num_tokens_S=[2, 3])


def test_what_padding_routes_to_is_nobody_s_business(model):
    model.layers["3"].router.__class__ = Physical
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch([3, 1], starts=[0, 4]):
            model(torch.randn(5, D))
        assert len(live.batch(num_tokens_S=[3, 1]).routed_experts_TLK) == 4


def test_fewer_tokens_than_counted_are_refused(model):
    with live_of(model) as live:  # noqa: SIM117
        with pytest.raises(ConfigError, match="saw 5 tokens; the microbatch counts 6"), live.microbatch([6]):
            model(torch.randn(5, D))


def test_rows_that_do_not_fit_the_tokens_are_refused(model):
    with torch.no_grad(), live_of(model) as live:
        with live.microbatch([5]):
            model(torch.randn(5, D))
        with pytest.raises(TraceError, match="5 recorded rows for 9 tokens"):
            live.batch(num_tokens_S=[9])


@pytest.mark.parametrize(
    "given",
    [{"counts": []}, {"counts": [-1]}, {"counts": [2], "sequences": [0, 1]}, {"counts": [1, 1], "sequences": [0, 0]}],
    ids=str,
)
def test_counts_that_cannot_be_are_refused(model, given):
    with live_of(model) as live, pytest.raises(ConfigError, match="counts, sequences and starts"), live.microbatch(**given):
        pytest.fail("the forward ran")


def test_counts_on_a_device_would_be_waited_for():
    meta = torch.zeros(2, dtype=torch.int64, device="meta")
    with live_of(Model()) as live, pytest.raises(ConfigError, match="counts is on meta"), live.microbatch(meta):
        pytest.fail("the forward ran")


def test_a_closed_recorder_records_no_more(model):
    with live_of(model) as live:
        pass
    with pytest.raises(ConfigError, match="closed"), live.microbatch([1]):
        pytest.fail("the forward ran")


# Nothing in the hooks waits for the device.


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


QUEUED = {
    "aten.detach", "aten.view", "aten._unsafe_view", "aten.slice", "aten.select", "aten.alias", "aten.empty", "aten.copy_",
    "aten.lt", "aten.ge", "aten.bitwise_or", "aten.any", "aten._to_copy", "aten.view.dtype", "aten.reshape",
}  # fmt: skip
"""Operations that give a device something to do and need no answer. ``_to_copy``: a flag's dtype, on its own device."""


def test_hooks_only_queue_work_and_a_microbatch_is_copied_once(model):
    """On a GPU an operation waits where it needs a value (item, nonzero, a Python bool); none of those is called."""
    x = torch.randn(5, D)
    with torch.no_grad():
        with Calls() as bare:
            model(x)
        with live_of(model) as live, Calls() as hooked, live.microbatch([2, 3]):
            model(x)
    own = list(hooked.seen)
    for call in bare.seen:
        own.remove(call)
    names = {call.rsplit(".", 1)[0] for call in own}
    assert names <= QUEUED, names - QUEUED
    assert "aten.copy_.default" in own
    # Two a layer into the device's buffer, one to the host.
    assert own.count("aten.copy_.default") == 2 * 2 + 1


def test_on_meta_tensors_which_have_no_values_the_hooks_run(model):
    """Reading any value would raise here; only the copy to the host, after the forward, does."""
    model.to("meta")
    with live_of(model) as live, pytest.raises((NotImplementedError, RuntimeError), match=r"[mM]eta"), live.microbatch([5]):  # noqa: PT012
        model(torch.randn(5, D, device="meta"))
        assert live._open.called_L == [True, True]


# Compiled models.


def test_hooks_set_before_compiling_record(model):
    x = torch.randn(5, D)
    live = live_of(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), live:
        with live.microbatch([5]):
            compiled(x)
        assert np.array_equal(live.batch(num_tokens_S=[5]).routed_experts_TLK, model.chosen(x))
    torch._dynamo.reset()


def test_hooks_set_after_compiling_record_or_say_why_not(model):
    x = torch.randn(5, D)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        with live_of(compiled) as live:  # noqa: SIM117
            with pytest.raises(ConfigError, match=r"Make LiveRoutes before torch\.compile"), live.microbatch([5]):
                compiled(x)
    torch._dynamo.reset()
