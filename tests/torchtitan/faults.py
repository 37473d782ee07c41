"""A task that ends or stops one rank's process in the middle of something: see test_interruptions.py.

ROUTEPACK_FAULT is ``place:rank:count:signal``: at the count-th time that rank is at that place, it gets the signal.
"""

import os
import signal
from dataclasses import dataclass

from routepack.components.expert_rerouter import ExpertRerouter
from routepack.distributed import collectives
from routepack.training import folders, logical_order
from routepack.training.tasks import CountingTask

PLACES = {
    "move": (collectives, "begin_messages"),  # one round of a move
    "plan": (ExpertRerouter, "place"),
    "save": (logical_order.LogicalSavePlanner, "lookup_object"),  # one item of a checkpoint
    "rename": (folders, "rename"),
}


def install(place: str, rank: str, count: str, name: str) -> None:
    owner, attribute = PLACES[place]
    original, times = getattr(owner, attribute), 0

    def struck(*args, **kwargs):
        nonlocal times
        times += 1
        if times == int(count):
            os.kill(os.getpid(), getattr(signal, name))
        return original(*args, **kwargs)

    if os.environ.get("RANK") == rank:
        setattr(owner, attribute, struck)


@dataclass(frozen=True, kw_only=True)
class FaultyTask(CountingTask):
    """The same task, in a process that will not live long."""

    def __post_init__(self) -> None:
        install(*os.environ["ROUTEPACK_FAULT"].split(":"))
