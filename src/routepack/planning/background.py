"""Plan the next window in a worker thread, from sequences as they arrive, while the trainer works.

The kernels that plan release Python's lock, so the trainer's thread goes on; what it still waits for is measured.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.checks import instance, real, whole
from routepack.core.errors import PlanError
from routepack.core.plans import ExpertPlacement, Plan
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.planning.planner import Planner

logger = logging.getLogger(__name__)

MIN_READY_SECONDS = 0.01
HANDED_OVER = 0.005
"""Seconds kept for a plan to get from its thread to the caller."""


@dataclass(frozen=True, kw_only=True)
class PlanTiming:
    """How long a plan took and how much of that anybody noticed."""

    plan_ms: float
    """From when the worker began until the plan was there, counting of a streamed window excluded."""
    exposed_ms: float
    """What the caller spent in ``submit`` or in ``add`` and ``finish``, and waiting in ``result``."""
    queued_ms: float
    """From ``submit`` or ``finish`` until the worker began: behind a window before it, or the last sequences to count."""

    def metrics(self, prefix: str = "plan/") -> dict[str, float]:
        """Plain floats, for any logger."""
        return {
            f"{prefix}exposed_ms": self.exposed_ms,
            f"{prefix}background_ms": self.plan_ms,
            f"{prefix}queued_ms": self.queued_ms,
        }


@dataclass(kw_only=True, eq=False)
class _Window:
    """One window on its way: when it was handed over, what the caller spent on it, and what becomes of it."""

    submitted: float
    spent_seconds: float
    future: Future[Plan] = field(default_factory=Future)
    began: float = 0.0
    ended: float = 0.0


@dataclass(kw_only=True, eq=False)
class BackgroundPlanner:
    """A :class:`~routepack.Planner` in a thread of its own: hand a window over, work on, ask for the plan.

    The plan is the one that the planner would have made in the caller's thread, bit for bit (with a fixed number of
    proposals). Call its methods from one thread. A first plan also loads compiled kernels, which holds Python's lock.

    >>> from routepack import AttentionAwarePacker, Topology, testing
    >>> planner = Planner(topology=Topology(data_parallel_degree=2, expert_parallel_degree=2),
    ...                   packer=AttentionAwarePacker(max_tokens=512))
    >>> window = testing.synthetic_demand(num_sequences=32, max_length=64)
    >>> with BackgroundPlanner(planner=planner) as background:
    ...     background.submit(window)
    ...     plan = background.result()
    >>> plan.digest == planner.plan(window).digest
    True
    """

    planner: Planner
    max_in_flight: int = 1
    """Windows that may be handed over before the first one's result is taken."""
    ready_seconds: float | None = None
    """Have the plan so many seconds after :meth:`submit` or :meth:`finish`: plan for what is left of them then, instead of
    for the planner's own budget. Such plans differ from run to run. None: the planner's budget, the same plan every time."""
    timing: PlanTiming | None = field(default=None, init=False)
    """Of the last result."""

    def __post_init__(self) -> None:
        instance("planner", self.planner, Planner)
        whole("max_in_flight", self.max_in_flight, least=1, most=2**31 - 1)
        if self.ready_seconds is not None:
            real("ready_seconds", self.ready_seconds, least=MIN_READY_SECONDS, most=86_400.0)
        # Counting has its own thread, so that sequences of the next window never queue behind the plan of this one.
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="routepack-plan")
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="routepack-count")
        self._windows: deque[_Window] = deque()
        self._closed = False
        self._start_stream()

    def submit(self, window: RolloutBatch | RoutingDemand, previous: ExpertPlacement | None = None) -> None:
        """Hand a window over and return at once. *previous*: where the experts will be when it is trained.

        Raises PlanError where ``max_in_flight`` windows already are on their way, or after :meth:`close`.
        """
        self._enqueue(lambda: window, previous, started=time.perf_counter(), spent=0.0)

    def add(
        self,
        routed_experts_TLK: np.ndarray,
        *,
        num_tokens: int,
        valid_T: np.ndarray | None = None,
        group: int = 0,
        modality: int | None = None,
    ) -> None:
        """Hand over one sequence of the next window as it arrives, as to the planner's ``collector.add``; counted elsewhere.

        The arrays must not change afterwards. What is wrong with them is raised by the window's :meth:`result`.
        """
        started = time.perf_counter()
        self._check_open()
        given = {"num_tokens": num_tokens, "valid_T": valid_T, "group": group, "modality": modality}
        self._counted.append(self._counting.submit(self._collector.add, routed_experts_TLK, **given))
        self._stream_seconds += time.perf_counter() - started

    def finish(self, previous: ExpertPlacement | None = None, *, order_S: Sequence[int] | None = None) -> None:
        """The sequences added so far are a window: plan it, as :meth:`submit` does. The next :meth:`add` begins another.

        *order_S*: which of them, by the order in which they were added, is each sequence of the window. None: as added.
        """
        started = time.perf_counter()
        self._check_room()
        demand = self._counting.submit(_counted_demand, self._counted, self._collector, order_S)
        # The plan names its window's digest at the end: taken meanwhile, it costs the plan nothing.
        self._counting.submit(lambda: demand.result().digest)
        spent = self._stream_seconds
        self._start_stream()
        self._enqueue(demand.result, previous, started=started, spent=spent)

    def result(self, timeout: float | None = None) -> Plan:
        """The plan of the oldest window handed over; waits for it.

        Raises whatever planning raised; TimeoutError after *timeout* seconds, after which it can be asked again;
        PlanError where no window was handed over.
        """
        if not self._windows:
            raise PlanError("no window is being planned: submit() one, or add() its sequences and finish() it.")
        window, started = self._windows[0], time.perf_counter()
        try:
            plan = window.future.result(timeout)
        except FutureTimeoutError:
            # A TimeoutError that planning itself raised is its result; ours leaves the window where it is.
            if not window.future.done():
                window.spent_seconds += time.perf_counter() - started
                raise
            self._windows.popleft()
            raise
        except BaseException:
            self._windows.popleft()
            raise
        self._windows.popleft()
        window.spent_seconds += time.perf_counter() - started
        self._record(window, plan)
        return plan

    @property
    def in_flight(self) -> int:
        """Windows handed over whose result was not taken."""
        return len(self._windows)

    @property
    def uncounted(self) -> int:
        """Sequences added to the window under way that are not counted yet, each with its ids still in memory."""
        while self._counted and self._counted[0].done() and self._counted[0].exception() is None:
            self._counted.popleft()
        return len(self._counted)

    @property
    def ready(self) -> bool:
        """Whether :meth:`result` would return or raise at once."""
        return bool(self._windows) and self._windows[0].future.done()

    def cancel(self) -> None:
        """Forget every window and sequence handed over. A plan being made runs to its end, and nobody gets it."""
        for window in self._windows:
            window.future.cancel()
        self._windows.clear()
        for counted in self._counted:
            counted.cancel()
        self._start_stream()

    def close(self) -> None:
        """Cancel, and end the threads; waits for a plan being made."""
        self.cancel()
        self._closed = True
        self._counting.shutdown(wait=True, cancel_futures=True)
        self._planning.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _start_stream(self) -> None:
        # A collector of its own for every window: the next one's sequences may arrive while this one's are summed up.
        self._collector: RoutingDemandCollector = replace(self.planner.collector)
        self._counted: deque[Future[None]] = deque()
        self._stream_seconds = 0.0

    def _enqueue(
        self,
        make: Callable[[], RolloutBatch | RoutingDemand],
        previous: ExpertPlacement | None,
        *,
        started: float,
        spent: float,
    ) -> None:
        self._check_room()
        window = _Window(submitted=started, spent_seconds=spent)
        self._windows.append(window)
        self._planning.submit(self._plan, window, make, previous)
        window.spent_seconds += time.perf_counter() - started

    def _plan(self, window: _Window, make: Callable[[], Any], previous: ExpertPlacement | None) -> None:
        """In the worker. Whatever happens becomes the window's future."""
        if not window.future.set_running_or_notify_cancel():
            return
        try:
            demand = make()
            window.began = time.perf_counter()
            plan = self._planner(window).plan(demand, previous=previous)
            window.ended = time.perf_counter()
        except CancelledError:
            window.future.set_exception(PlanError("the window was cancelled while its sequences were counted."))
        except BaseException as error:
            window.future.set_exception(error)
        else:
            window.future.set_result(plan)

    def _planner(self, window: _Window) -> Planner:
        if self.ready_seconds is None:
            return self.planner
        left = self.ready_seconds - (window.began - window.submitted) - HANDED_OVER
        limit = max(MIN_READY_SECONDS / 10, left)
        return replace(self.planner, num_proposals=None, time_limit_seconds=limit)

    def _record(self, window: _Window, plan: Plan) -> None:
        self.timing = PlanTiming(
            plan_ms=1e3 * (window.ended - window.began),
            exposed_ms=1e3 * window.spent_seconds,
            queued_ms=1e3 * (window.began - window.submitted),
        )
        logger.info(
            "planned %d sequences in %.1f ms, %.1f ms exposed (value %.4f, bound %.4f)",
            plan.packing.num_sequences, self.timing.plan_ms, self.timing.exposed_ms, plan.value, plan.bound,
        )  # fmt: skip

    def _check_open(self) -> None:
        if self._closed:
            raise PlanError("the background planner is closed: make another one.")

    def _check_room(self) -> None:
        self._check_open()
        if len(self._windows) >= self.max_in_flight:
            raise PlanError(
                f"max_in_flight={self.max_in_flight} windows are being planned: take a result() first, or allow more."
            )


def _counted_demand(
    counted: deque[Future[None]], collector: RoutingDemandCollector, order_S: Sequence[int] | None
) -> RoutingDemand:
    """What was counted; raises what the first sequence with something wrong raised."""
    for one in counted:
        one.result()
    return collector.demand(order_S)
