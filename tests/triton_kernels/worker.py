"""One rank of test_ranks.py: ``worker.py fsdp|ep RANK WORLD_SIZE STORE OUT``."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from routepack.distributed.collectives import leave
from routepack.triton_kernels import PermutedExperts, PermutedMoE, grouped_experts
from routepack.triton_kernels.testing import random_problem

T, D, F, K, E = 24, 16, 12, 2, 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(PermutedMoE(dim=D, hidden_dim=F, num_experts=E, top_k=K) for _ in range(2)))


def train(rank, world_size):
    """Losses of eight steps over the same tokens, however many ranks share them."""
    layers = model()
    if world_size:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.02)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    share = x.chunk(max(world_size, 1))[rank]
    losses = []
    for _ in range(8):
        loss = (layers(share) - share.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world_size:
            dist.all_reduce(total)
        losses.append(float(total) / max(world_size, 1))
    return losses


def dispatched(rank, world_size):
    """Output and gradients with experts and tokens split over the ranks, rows brought by all-to-all and left in rank order."""
    problem = random_problem(T=T, D=D, F=F, K=K, E=E)
    own = slice(rank * T // world_size, (rank + 1) * T // world_size)
    x, scores = (tensor[own].clone().requires_grad_() for tensor in (problem.x, problem.scores))
    experts = PermutedExperts(dim=D, hidden_dim=F, num_experts=E // world_size)
    mine = slice(rank * E // world_size, (rank + 1) * E // world_size)
    with torch.no_grad():
        for name, w in (("w1_EFD", problem.w1), ("w3_EFD", problem.w3), ("w2_EDF", problem.w2)):
            getattr(experts, name).copy_(w[mine])

    ids_N = problem.ids[own].flatten()
    order_N = torch.argsort(ids_N, stable=True)
    sent_E = torch.bincount(ids_N, minlength=E)
    received_WE = torch.empty_like(sent_E)
    dist.all_to_all_single(received_WE, sent_E)
    received_WE = received_WE.view(world_size, -1)
    splits_in, splits_out = sent_E.view(world_size, -1).sum(1).tolist(), received_WE.sum(1).tolist()
    group = dist.group.WORLD
    rows = all_to_all_single_autograd(x[order_N // K], splits_out, splits_in, group)

    # Rows lie rank by rank, each rank's sorted by expert; the index walks them expert by expert.
    expert_R = torch.cat([torch.repeat_interleave(torch.arange(E // world_size), counts) for counts in received_WE])
    row_index = torch.argsort(expert_R, stable=True)
    weights = (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
    y = grouped_experts(rows, received_WE.sum(0), *weights, row_index=row_index)
    back = all_to_all_single_autograd(y, splits_in, splits_out, group)
    y_TKD = torch.empty_like(back).index_copy(0, order_N, back).view(-1, K, D)
    out = (y_TKD * scores[..., None]).sum(1)
    out.backward(problem.dout[own])
    return [out.detach(), x.grad, scores.grad, *(w.grad for w in weights)]


if __name__ == "__main__":
    case, rank, world_size, store, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.save(train(rank, world_size) if case == "fsdp" else dispatched(rank, world_size), f"{out}.{rank}")
    leave()
