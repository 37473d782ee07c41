"""RoutePack's collectives: agreeing on a plan, sharing it, and exchanging what ranks hold.

Every rank must call them together; without an initialised process group each acts as on a single rank. Where a rank is lost,
the others get a RankLostError that says what was going on.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from routepack.core.arrays import digest_of
from routepack.core.errors import PlanError, RankLostError, RoutePackError, heard

T = TypeVar("T")


def num_ranks() -> int:
    """The ranks of the world; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """This process's rank in the world; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


GLOO_ERROR = re.compile(r"\[\S*gloo/\S+\.cc:\d+\] |Application timeout caused pair closure$")
"""How the message of a gloo error begins. gloo raises plain RuntimeErrors, so there is no type to tell them by.

With torch 2.13 the message begins with a line of gloo's source, in every collective, where a peer was killed
("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer") or did not answer in time
("[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"). Whatever is called after such a timeout says the other.
"""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Say what was going on where a collective inside the block loses a rank: *what* follows "while".

    Raises RankLostError in place of the backend's own error. All other errors pass, whatever their text says.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not (type(error) is RuntimeError and GLOO_ERROR.match(str(error))):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RankLostError(
            f"rank {this_rank()} lost another rank while {what} ({first_line}). Start again: a run with checkpoints resumes "
            "from the last complete one."
        ) from error


def backend_device() -> torch.device:
    """Where tensors must lie for the world's collectives: on the accelerator if its backend is NCCL, else on the CPU."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.accelerator.current_device_index()) if nccl else torch.device("cpu")


def from_rank(source: int, make: Callable[[], T], what: str) -> T:
    """What *make* gives on rank *source*, on every rank; it is called only there.

    Where it raises, every rank raises, so that none is left waiting: rank *source* the error itself, the others a PlanError
    that quotes it.

    Args:
        what: a name for errors, such as ``plan``.
    """
    value, error = None, None
    if this_rank() == source:
        try:
            value = make()
        except Exception as caught:
            # Raised below, once the others have heard of it.
            error = caught
    said = f"{type(error).__name__}: {error}" if error is not None else ""
    if num_ranks() > 1:
        shared = [(value, said)]
        with together(f"rank {source} made the {what}"):
            dist.broadcast_object_list(shared, src=source)
        value, said = shared[0]
    if error is not None:
        raise error
    if said:
        raise heard(PlanError(f"rank {source} could not make the {what}: {said}"))
    return cast(T, value)


def meet(what: str) -> None:
    """Wait until every rank is here; *what* says in an error what was going on."""
    if num_ranks() > 1:
        with together(what):
            dist.barrier()


SAME_PLAN = (
    "broadcast rank 0's, or plan on every rank with the same seed and a fixed number of proposals, not a time limit. "
    "Nothing was moved"
)


def agree(
    digest: str,
    what: str,
    *,
    error: RoutePackError | None = None,
    device: torch.device | str | None = None,
    remedy: str = SAME_PLAN,
) -> None:
    """Go on only if no rank has an *error* and all hold the same *digest* of *what*; otherwise every rank raises.

    A rank with an error raises that one, the others a PlanError: no rank is left waiting in a later collective.

    Args:
        digest: hexadecimal, such as ``plan.content_digest()``.
        device: of the tensors that are compared; None: one that the ranks' backend takes.
        remedy: what to do where digests differ.
    """
    words = np.frombuffer(bytes.fromhex(digest)[:32].ljust(32, b"\0"), dtype=np.int64)
    mine = torch.tensor([int(error is not None), *words.tolist()], dtype=torch.int64, device=device or backend_device())
    lowest, highest = mine, mine.clone()
    if num_ranks() > 1:
        lowest = mine.clone()
        with together(f"ranks compared their {what}"):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if highest[0]:
        raise heard(PlanError(f"another rank could not use its {what}: see its error. Nothing was moved."))
    if not torch.equal(lowest, highest):
        raise PlanError(f"rank {this_rank()} holds {what} {digest[:12]}, another rank holds a different one: {remedy}.")


def agree_on_call(call: str, *, device: torch.device | str | None = None) -> None:
    """Go on only if every rank was asked for the same *call*; ranks in different ones would wait for one another.

    Raises PlanError on every rank.
    """
    remedy = f"this one was asked for {call}; every rank makes the same calls with the same numbers. Nothing was moved"
    agree(digest_of(np.frombuffer(call.encode(), np.uint8)), "call", device=device, remedy=remedy)


def exchange(leaving: Sequence[T], what: str) -> list[T]:
    """What every rank sends to this one, by rank; ``leaving[r]`` goes to rank r. Pickled, in one ragged all-to-all.

    *what* names it in an error.
    """
    if num_ranks() == 1:
        return list(leaving)
    device, payloads = backend_device(), [pickle.dumps(one, pickle.HIGHEST_PROTOCOL) for one in leaving]
    sizes = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64, device=device)
    payload = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).to(device)
    arriving_sizes = torch.empty_like(sizes)
    with together(f"{what} were exchanged"):
        dist.all_to_all_single(arriving_sizes, sizes)
        splits = arriving_sizes.tolist()
        arriving = torch.empty(sum(splits), dtype=torch.uint8, device=device)
        dist.all_to_all_single(arriving, payload, splits, sizes.tolist())
    data = arriving.cpu().numpy().data
    return [pickle.loads(data[begin:end]) for begin, end in pairwise(accumulate(splits, initial=0))]


Message = tuple[int, Tensor]
"""The rank that a tensor goes to or comes from."""


def begin_messages(sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
    """Send some tensors and fill others, each in place; both must be left alone until what this gives is called.

    Between two ranks, messages arrive in the order in which they were sent. Not collective: ranks without any take no part.
    Raises RankLostError where another rank does not answer.
    """
    operations = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    works: list[dist.Work] = []
    if operations:
        with together("rows were exchanged"):
            works = dist.batch_isend_irecv(operations)

    def end() -> None:
        with together("rows were exchanged"):
            for work in works:
                work.wait()

    return end


def from_all(value: T, what: str) -> list[T]:
    """Every rank's *value*, by rank, on every rank; *what* names it in an error."""
    values: list[T] = [value] * num_ranks()
    if num_ranks() > 1:
        with together(f"{what} was gathered"):
            dist.all_gather_object(values, value)
    return values


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of *values* over all ranks, in place."""
    if num_ranks() > 1:
        with together("figures were summed"):
            dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The greatest of *values* over all ranks, each for itself, in place."""
    if num_ranks() > 1:
        with together("figures were compared"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def leave(status: int = 0) -> NoReturn:
    """End this rank's process once its work is saved: together with the other ranks if *status* is 0, else alone.

    It skips the interpreter's own shutdown. There, a gloo thread that asks for the interpreter's lock is ended inside torch's
    C++ code, which aborts the process ("terminate called without an active exception") after everything was complete.
    """
    if dist.is_initialized() and status == 0:
        dist.barrier()
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
