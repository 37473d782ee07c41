"""The layer inside what models are trained with: torch.compile, checkpointing, and the bytes that it keeps."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from routepack.triton_kernels import PermutedExperts, PermutedMoE, grouped_experts, moe_experts, torch_operators
from routepack.triton_kernels.testing import random_problem, relative_errors


def arguments(problem):
    return problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2


def gradients(layer, problem):
    problem = problem.requiring_grad()
    out = layer(*arguments(problem))
    return [out.detach(), *torch.autograd.grad(out, problem.inputs, problem.dout)]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


OPERATOR_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("test", OPERATOR_TESTS)
@pytest.mark.parametrize("save_h", [False, True])
@pytest.mark.parametrize("dispatched", [False, True])
def test_operators_are_what_they_declare(test, save_h, dispatched):
    problem = random_problem(T=6, D=8, F=4, K=2, E=3).requiring_grad()
    if test == "test_aot_dispatch_dynamic" and not save_h:
        problem = random_problem(T=6, D=8, F=4, K=2, E=3)
    order, inverse, offsets = torch_operators.route(problem.ids, 3)
    weights = (problem.w1, problem.w3, problem.w2)
    if dispatched:
        rows = (problem.x, None, *weights, torch.tensor([0, 2, 3, 5], dtype=torch.int32), None, None, 1)
    else:
        rows = (problem.x, problem.scores, *weights, offsets, order, inverse, 2)
    operands = (*rows, save_h, "eager", None, None, None, None, None)
    torch.library.opcheck(torch.ops.routepack.experts.default, operands, test_utils=test)
    torch.library.opcheck(torch.ops.routepack.route.default, (problem.ids, 3), test_utils=test)


def test_backward_operators_are_what_they_declare():
    problem = random_problem(T=6, D=8, F=4, K=2, E=3)
    order, inverse, offsets = torch_operators.route(problem.ids, 3)
    inputs = (problem.x, problem.scores, problem.w1, problem.w3, problem.w2)
    _, h = torch_operators.experts(*inputs, offsets, order, inverse, 2, True, "eager", None, None, None, None, None)
    routing = (offsets, order, inverse)
    for needs in ([True] * 5, [False, True, False, True, False]):
        options = (2, needs, "eager", None, None)
        torch.library.opcheck(torch.ops.routepack.experts_backward.default, (problem.dout, *inputs, h, *routing, *options))
        sums = [torch.zeros_like(w) for w in inputs[2:]]
        into = (*sums, problem.dout, *inputs, h, *routing, *options)
        torch.library.opcheck(torch.ops.routepack.experts_backward_into.default, into)


def test_compiled_whole_with_any_number_of_tokens():
    torch._dynamo.reset()
    compiled = torch.compile(moe_experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (20, 33, 7):
        problem = random_problem(T=T, D=8, F=12, K=2, E=3, seed=T)
        assert same_bits(gradients(compiled, problem), gradients(moe_experts, problem))


def test_compiled_after_a_dispatch():
    torch._dynamo.reset()
    compiled = torch.compile(grouped_experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (20, 33):
        problem = random_problem(T=T, D=8, F=12, K=1, E=3)
        rows = (problem.x, torch.tensor([4, 0, 9]), problem.w1, problem.w3, problem.w2)
        assert torch.equal(compiled(*rows), grouped_experts(*rows))


def test_a_compiled_module_compiles_once_for_all_numbers_of_tokens():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    moe = PermutedMoE(dim=8, hidden_dim=12, num_experts=4, top_k=2)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=counter)
    for T in (20, 33, 7):
        x = torch.randn(T, 8)
        assert torch.equal(compiled(x), moe(x))
    assert counter.frame_count == 1


def test_checkpointing_gives_the_same_bits():
    problem = random_problem(T=20, D=8, F=12, K=2, E=3)
    assert same_bits(gradients(partial(checkpoint, moe_experts, use_reentrant=False), problem), gradients(moe_experts, problem))


@pytest.mark.parametrize(("saved", "runs"), [(True, 1), (False, 2)])
def test_selective_checkpointing_can_keep_the_experts(saved, runs, monkeypatch):
    kept = (torch.ops.routepack.experts.default, torch.ops.routepack.route.default) if saved else ()

    def policy(_, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    calls, forward = [], torch_operators.eager_experts.forward
    monkeypatch.setattr(
        torch_operators.eager_experts, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    )
    problem = random_problem(T=20, D=8, F=12, K=2, E=3)
    layer = partial(
        checkpoint, moe_experts, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    actual = gradients(layer, problem)
    assert len(calls) == runs
    assert same_bits(actual, gradients(moe_experts, problem))


def kept_bytes(function, parameters):
    """Bytes of distinct memory that autograd keeps for the backward pass, parameters aside, as floats and as integers."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor.is_floating_point(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    floats = sum(size for size, is_float, _ in storages.values() if is_float)
    return floats, sum(size for size, _, _ in storages.values()) - floats, out


@pytest.mark.parametrize(("recompute", "per_token"), [("none", 2 * 64 + 4 * 4 * 32), ("gate_up", 2 * 64)])
def test_bytes_kept_for_the_backward_pass(recompute, per_token):
    T, D, F, K, E = 50, 64, 32, 4, 8
    problem = random_problem(T=T, D=D, F=F, K=K, E=E, dtype=torch.bfloat16).requiring_grad()
    layer = partial(moe_experts, *arguments(problem), recompute=recompute)
    floats, integers, _ = kept_bytes(layer, [problem.w1, problem.w3, problem.w2])
    score_bytes = 4 * T * K
    assert floats - score_bytes == T * per_token
    assert integers == 8 * T * K + 4 * (E + 1)


def test_inputs_are_kept_as_they_are_not_as_copies():
    problem = random_problem(T=50, D=64, F=32, K=4, E=8, dtype=torch.bfloat16)
    wide, w13 = torch.randn(50, 128).bfloat16().requires_grad_(), torch.cat([problem.w1, problem.w3], dim=1).requires_grad_()
    inputs = (wide, w13, problem.scores, problem.w2)
    layer = partial(moe_experts, wide[:, ::2], problem.ids, problem.scores, w13[:, :32], w13[:, 32:], problem.w2)
    h_bytes = 2 * 50 * 4 * 32 * 2
    assert kept_bytes(layer, inputs)[0] == h_bytes


def test_nothing_is_kept_without_training():
    problem = random_problem(T=50, D=64, F=32, K=4, E=8, dtype=torch.bfloat16)
    assert kept_bytes(partial(moe_experts, *arguments(problem)), [])[:2] == (0, 0)
    with torch.no_grad():
        _, h = torch.ops.routepack.experts(
            problem.x, None, problem.w1, problem.w3, problem.w2,
            torch.zeros(9, dtype=torch.int32), None, None, 1, False, "eager", None, None, None, None, None,
        )  # fmt: skip
    assert h.numel() == 0


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_shapes_without_numbers(mode):
    with FakeTensorMode() if mode == "fake" else torch.device("meta"):
        moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=4, top_k=2)
        x, counts = torch.randn(3, 8), torch.ones(4, dtype=torch.long)
        assert moe(x).shape == (3, 8)
        assert moe.experts.grouped(x, counts, row_index=torch.arange(3)).shape == (3, 8)


def test_the_operator_of_no_rows_is_what_it_declares():
    problem = random_problem(T=0, D=8, F=4, K=1, E=2)
    offsets, order = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([-1, -1], dtype=torch.int32)
    operands = (problem.x, None, problem.w1, problem.w3, problem.w2, offsets, order, None, 1, True, "eager", *(None,) * 5)
    torch.library.opcheck(torch.ops.routepack.experts.default, operands, test_utils="test_faketensor")


def torchtitan_layer(dim, hidden_dim, num_experts, top_k):
    """TorchTitan's own experts and local dispatcher."""
    moe = pytest.importorskip("torchtitan.models.common.moe")
    dispatcher = pytest.importorskip("torchtitan.models.common.token_dispatcher")
    config = moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts),
        token_dispatcher=dispatcher.LocalTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
    )
    return config.build().bfloat16()


def test_it_keeps_at_least_four_times_less_than_torchtitan_at_the_size_of_qwen3_30b():
    # E is scaled down from 128: what is kept for a token does not depend on it.
    T, D, F, K, E = 32, 2048, 768, 8, 8
    stock = torchtitan_layer(D, F, E, K)
    problem = random_problem(T=T, D=D, F=F, K=K, E=E, dtype=torch.bfloat16)
    ours = PermutedExperts(dim=D, hidden_dim=F, num_experts=E, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, w in (("w1_EFD", problem.w1), ("w3_EFD", problem.w3), ("w2_EDF", problem.w2)):
            getattr(stock.inner_experts, name).copy_(w)
            getattr(ours, name).copy_(w)
    x, scores = problem.x.requires_grad_(), problem.scores.requires_grad_()
    counts = torch.bincount(problem.ids.flatten(), minlength=E)
    stock_bytes, _, stock_out = kept_bytes(partial(stock, x[None], scores[None], problem.ids[None], counts), stock.parameters())
    our_bytes, _, our_out = kept_bytes(partial(ours, x, problem.ids, scores), ours.parameters())
    assert relative_errors([our_out], [stock_out[0]])[0] < 2e-2
    assert stock_bytes / our_bytes >= 4, (stock_bytes / T, our_bytes / T)


def test_the_module_replays_a_route_and_its_router_learns():
    moe = PermutedMoE(dim=8, hidden_dim=12, num_experts=4, top_k=2)
    x = torch.randn(2, 5, 8)
    ids = torch.randint(0, 4, (2, 5, 2))
    ids[0, 0] = -1
    out = moe(x, topk_ids=ids)
    assert torch.equal(moe.last_topk_ids, ids)
    assert torch.equal(out[0, 0], torch.zeros(8))
    out.sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0
    assert torch.isfinite(moe.router.weight.grad).all()


@pytest.mark.parametrize("normalize_scores", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
def test_the_router_of_one_expert_a_token_learns(normalize_scores, replayed):
    moe = PermutedMoE(dim=8, hidden_dim=12, num_experts=4, top_k=1, normalize_scores=normalize_scores)
    x = torch.randn(20, 8)
    probabilities = torch.softmax(moe.router(x), dim=-1)
    ids = torch.randint(0, 4, (20, 1)) if replayed else probabilities.topk(1).indices
    out = moe(x, topk_ids=ids if replayed else None)
    assert torch.equal(out, moe.experts(x, ids, probabilities.gather(1, ids)))
    out.square().sum().backward()
    assert moe.router.weight.grad.norm() > 1e-2 * moe.experts.w1_EFD.grad.norm()


def test_scores_of_several_experts_a_token_add_up_to_one():
    moe = PermutedMoE(dim=8, hidden_dim=12, num_experts=4, top_k=2)
    x = torch.randn(20, 8)
    scores, ids = torch.softmax(moe.router(x), dim=-1).topk(2)
    assert torch.equal(moe(x), moe.experts(x, ids, scores / scores.sum(-1, keepdim=True)))
    moe.normalize_scores = False
    assert torch.equal(moe(x), moe.experts(x, ids, scores))
