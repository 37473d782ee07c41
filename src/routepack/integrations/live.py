"""Routes collected live: hooks on any model's routers, while it samples or recomputes log-probabilities.

Needs torch and no trainer. What a router chose is narrowed on its device, each microbatch travels to the host in one
asynchronous copy, and nothing is read back before :meth:`LiveRoutes.batch`. Letters: :mod:`routepack.core`; n fed tokens.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.checks import whole
from routepack.core.errors import ConfigError, TraceError
from routepack.core.rollouts import MOST_EXPERTS, RolloutBatch, id_dtype

ChosenIds = Callable[[Any, int], Tensor]
"""The ids [..., K] in a router's output, given that and K."""
_TORCH_DTYPES = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


def ids_in_output(output: Any, top_k: int) -> Tensor:
    """The one tensor of whole numbers with a last axis of K: TorchTitan's routers, and those that give their choice.

    >>> ids_in_output((torch.zeros(3, 2), torch.tensor([[0, 1], [2, 0], [1, 2]])), 2).shape
    torch.Size([3, 2])
    """
    parts = output if isinstance(output, list | tuple) else [output]
    found = [part for part in parts if isinstance(part, Tensor) and _holds_ids(part, top_k)]
    if len(found) != 1:
        kinds = [f"{tuple(part.shape)} {part.dtype}" if isinstance(part, Tensor) else type(part).__name__ for part in parts]
        raise ConfigError(
            f"a router's output {kinds} has {len(found)} tensors of whole numbers with a last axis of top_k={top_k}: say by "
            "ids_of= where the chosen ids are, such as ids_from_logits."
        )
    return found[0]


def ids_from_logits(output: Any, top_k: int) -> Tensor:
    """The K largest of the logits or scores [..., E] that are a router's only (or first) output.

    Only for routers that choose so: neither a bias nor a limit to groups of experts is known here.
    """
    logits = output[0] if isinstance(output, list | tuple) else output
    return torch.topk(logits, top_k, dim=-1, sorted=False).indices


def _holds_ids(tensor: Tensor, top_k: int) -> bool:
    whole_numbers = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
    return whole_numbers and tensor.ndim >= 1 and tensor.shape[-1] == top_k


@dataclass(eq=False)
class _Microbatch:
    """Rows of one forward, on their way to the host."""

    sequences: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    num_rows: int
    flat: Tensor | None = None
    """uint8: the bytes of the ids [n, L, K], then a flag for each row that says whether an id of it is none."""
    called_L: list[bool] | None = None


class LiveRoutes:
    """Records what a model's routers choose, microbatch by microbatch and sequence by sequence.

    Args:
        model: any module.
        routers: its routers: a type (or several), a pattern of module names such as ``"*.mlp.gate"``, or a mapping from
            absolute layer to module. Each is bound by (module, layer); the layer is the number in its name.
        num_experts: E, logical routed experts.
        top_k: K.
        max_bytes: what recorded ids may hold on the host; a microbatch that would exceed it is refused before it runs.
        ids_of: where a router's output has its choice.

    The hooks stay on until :meth:`close`, or the end of a ``with`` block, and record inside :meth:`microbatch` alone, so a
    forward recomputed in a backward pass is not counted twice. Make it before ``torch.compile``.

    >>> router = nn.Linear(4, 8)
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([router])})
    >>> with LiveRoutes(model, nn.Linear, num_experts=8, top_k=2, ids_of=ids_from_logits) as live:
    ...     with live.microbatch([3, 2]):
    ...         _ = router(torch.zeros(5, 4))
    ...     batch = live.batch(num_tokens_S=[4, 2])
    >>> batch.routed_experts_TLK.shape, np.diff(batch.cu_seqlens).tolist()
    ((5, 1, 2), [3, 2])

    """

    def __init__(
        self,
        model: nn.Module,
        routers: type[nn.Module] | tuple[type[nn.Module], ...] | str | Mapping[int, nn.Module],
        *,
        num_experts: int,
        top_k: int,
        max_bytes: int = 2**30,
        ids_of: ChosenIds = ids_in_output,
    ) -> None:
        self.num_experts = whole("num_experts", num_experts, least=1, most=MOST_EXPERTS)
        self.top_k = whole("top_k", top_k, least=1, most=self.num_experts)
        self.max_bytes = whole("max_bytes", max_bytes, least=1)
        self._ids_of = ids_of
        self._dtype = _TORCH_DTYPES[str(id_dtype(self.num_experts))]
        bound = bind_routers(model, routers)
        self.layer_ids = np.asarray(sorted(bound), dtype=np.int32)
        """int32 [L]: the absolute layers of the routers."""
        self._names = [bound[layer][0] for layer in self.layer_ids.tolist()]
        self._recorded: list[_Microbatch] = []
        self._open: _Microbatch | None = None
        self._devices: set[torch.device] = set()
        # Never traced: a compiled graph breaks here and runs the hook as it is.
        self._handles = [
            bound[layer][1].register_forward_hook(torch.compiler.disable(self._hook_of(index)))
            for index, layer in enumerate(self.layer_ids.tolist())
        ]

    @property
    def num_bytes(self) -> int:
        """What recorded ids hold on the host now."""
        return sum(self._bytes_of(recorded.num_rows) for recorded in self._recorded)

    @contextmanager
    def microbatch(
        self, counts: Sequence[int], *, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> Generator[None, None, None]:
        """One forward inside: ``counts[i]`` of its tokens are the next of sequence ``sequences[i]``.

        Args:
            counts: tokens fed in of each sequence, as numbers on the host.
            sequences: which of the window; None: 0, 1, ... Rows of one sequence are appended in order of arrival, as
                sampling with a cache gives them.
            starts: where each begins among the forward's tokens, batch rows end to end; None: one after another. So
                padding anywhere is left out: ``starts=[b * width for b in range(B)]`` for rows padded at the end.

        Raises:
            ConfigError: above ``max_bytes``; a router not called, or more than once; fewer tokens than counted. Nothing of the
                microbatch is kept then, nor after an exception inside.

        """
        if self._open is not None or not self._handles:
            state = "closed" if not self._handles else "inside another microbatch"
            raise ConfigError(f"LiveRoutes is {state}: record one forward after another, before close().")
        self._open = opened = _microbatch(counts, sequences, starts)
        try:
            self._check_room(opened.num_rows)
            yield
            self._check_complete(opened)
            assert opened.flat is not None
            self._devices.add(opened.flat.device)
            opened.flat = _sent_to_host(opened.flat)
            self._recorded.append(opened)
        finally:
            self._open = None
            opened.called_L = None

    def batch(self, *, num_tokens_S: Sequence[int] | np.ndarray, **fields: Any) -> RolloutBatch:
        """What was recorded, as one batch of S sequences; then start over. Waits for the copies.

        Args:
            num_tokens_S: int [S], tokens of each sequence: as many as its rows, or one more.
            fields: further ones of a RolloutBatch, such as ``group_S`` and ``token_fields``.

        Raises:
            TraceError: rows that do not fit the tokens, or an id outside 0 .. E - 1.

        """
        tokens_S = np.asarray(num_tokens_S, dtype=np.int64)
        parts = self._parts_of(len(tokens_S))
        rows_S = [sum(len(part) for part in own) for own in parts]
        nothing = np.zeros((0, len(self.layer_ids), self.top_k), dtype=id_dtype(self.num_experts))
        return RolloutBatch(
            routed_experts_TLK=np.concatenate([nothing, *(part for own in parts for part in own)]),
            cu_seqlens=np.concatenate([[0], np.cumsum(rows_S)]).astype(np.int64),
            num_tokens_S=tokens_S,
            num_experts=self.num_experts,
            layer_ids_L=self.layer_ids,
            **fields,
        )

    def count_into(self, collector: RoutingDemandCollector, *, num_tokens_S: Sequence[int] | np.ndarray) -> None:
        """Add what was recorded to *collector*, sequence by sequence, and let the ids go."""
        batch = self.batch(num_tokens_S=num_tokens_S)
        for sequence in range(batch.num_sequences):
            collector.add(batch.routed_experts_of(sequence), num_tokens=int(batch.num_tokens_S[sequence]))

    def clear(self) -> None:
        """Forget what was recorded."""
        self._recorded, self._devices = [], set()

    def close(self) -> None:
        """Take the hooks off and forget what was recorded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()

    def __enter__(self) -> LiveRoutes:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _hook_of(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._open is not None:
                self._record(self._open, index, output)

        return hook

    @torch.no_grad()
    def _record(self, opened: _Microbatch, index: int, output: Any) -> None:
        """Everything here is queued on the router's device; no value of it is looked at."""
        called = opened.called_L = opened.called_L or [False] * len(self._names)
        if called[index]:
            raise ConfigError(f"router {self._names[index]} was called twice in one microbatch: record one forward in each.")
        ids = self._ids_of(output, self.top_k).detach()
        ids_nK = (ids.to_local() if hasattr(ids, "to_local") else ids).reshape(-1, self.top_k)
        if len(ids_nK) < opened.num_rows:
            raise ConfigError(
                f"router {self._names[index]} saw {len(ids_nK)} tokens; the microbatch counts {opened.num_rows}: give "
                "the counts of this rank's tokens. Sequences split over ranks (context or sequence parallel) are not recorded."
            )
        if opened.flat is None:
            opened.flat = torch.empty(self._bytes_of(opened.num_rows), dtype=torch.uint8, device=ids.device)
        ids_nLK, is_bad_n = self._views(opened.flat, opened.num_rows)
        ids_nK = ids_nK[: opened.num_rows].to(opened.flat.device, non_blocking=True)
        # Narrowing would fold an id that is none into one that is.
        outside_n = ((ids_nK < 0) | (ids_nK >= self.num_experts)).any(dim=1)
        is_bad_n.copy_(outside_n | is_bad_n.bool() if any(called) else outside_n)
        ids_nLK[:, index].copy_(ids_nK)
        called[index] = True

    def _views(self, flat: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ids = flat[: len(flat) - rows].view(self._dtype)
        return ids.view(rows, len(self._names), self.top_k), flat[len(flat) - rows :]

    def _check_room(self, rows: int) -> None:
        needed = self.num_bytes + self._bytes_of(rows)
        if needed > self.max_bytes:
            raise ConfigError(
                f"max_bytes={self.max_bytes} is too little: {self.num_bytes} bytes of ids are recorded, and this microbatch's "
                f"{rows} tokens bring them to {needed}. Raise it, or take batch() or count_into() more often."
            )

    def _bytes_of(self, rows: int) -> int:
        return rows * (len(self._names) * self.top_k * self._dtype.itemsize + 1)

    def _check_complete(self, opened: _Microbatch) -> None:
        called_L = opened.called_L or [False] * len(self._names)
        missed = [name for name, called in zip(self._names, called_L, strict=True) if not called]
        if missed:
            raise ConfigError(
                f"router {missed[0]} was not called in this microbatch ({len(missed)} of {len(called_L)} were not): the "
                "forward ran another module, or was compiled before the hooks were set. Make LiveRoutes before torch.compile."
            )

    def _parts_of(self, num_sequences: int) -> list[list[np.ndarray]]:
        """Of each sequence, its rows as they arrived; nothing stays recorded."""
        recorded, devices = self._recorded, self._devices
        self.clear()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        parts: list[list[np.ndarray]] = [[] for _ in range(num_sequences)]
        for one in recorded:
            assert one.flat is not None
            ids_nLK, is_bad_n = (view.numpy() for view in self._views(one.flat, one.num_rows))
            for sequence, start, count in zip(one.sequences.tolist(), one.starts.tolist(), one.counts.tolist(), strict=True):
                if sequence >= num_sequences:
                    raise TraceError(f"sequence {sequence} was recorded; num_tokens_S has {num_sequences} entries.")
                if is_bad_n[start : start + count].any():
                    row = sum(map(len, parts[sequence])) + int(is_bad_n[start : start + count].argmax())
                    raise TraceError(
                        f"sequence {sequence}, row {row}: a router chose an id outside 0 .. {self.num_experts - 1}: are these "
                        "physical ids, or is num_experts wrong?"
                    )
                parts[sequence].append(ids_nLK[start : start + count])
        return parts


def bind_routers(
    model: nn.Module, routers: type[nn.Module] | tuple[type[nn.Module], ...] | str | Mapping[int, nn.Module]
) -> dict[int, tuple[str, nn.Module]]:
    """Name and module of the router of each absolute layer.

    Raises ConfigError where none is found, one is no part of *model* (an orphan of a model built before), a layer's number
    cannot be read from the name, or two claim one layer, as draft (MTP) layers do.
    """
    names = {module: _plain(name) for name, module in model.named_modules()}
    if isinstance(routers, Mapping):
        found = [(layer, names.get(module), module) for layer, module in routers.items()]
    else:
        chosen = [(name, module) for module, name in names.items() if _matches(name, module, routers)]
        found = [(_layer_in(name), name, module) for name, module in chosen]
    bound: dict[int, tuple[str, nn.Module]] = {}
    for layer, name, module in found:
        if name is None:
            raise ConfigError(f"the router given for layer {layer} is no module of this model: it would never be called.")
        whole("layer", layer, least=0, most=2**31 - 1)
        if layer in bound or any(module is other for _, other in bound.values()):
            taken = bound.get(layer) or next(pair for pair in bound.values() if pair[1] is module)
            raise ConfigError(
                f"routers {taken[0]} and {name} claim one layer ({layer}), or are one module: a draft (MTP) layer must not "
                "share a number with a decoder layer. Give routers={layer: module}, without draft layers."
            )
        bound[layer] = (name, module)
    if not bound:
        raise ConfigError(f"routers={routers!r} matches no module of {type(model).__name__}: name its router's type or path.")
    return bound


def _matches(name: str, module: nn.Module, routers: Any) -> bool:
    return fnmatch.fnmatchcase(name, routers) if isinstance(routers, str) else isinstance(module, routers)


def _plain(name: str) -> str:
    """Without what torch.compile, checkpointing and FSDP1 put between."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)", "", name).lstrip(".")


def _layer_in(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ConfigError(
            f"router {name!r} has {len(numbers)} numbers in its name; the layer is one. Give routers={{layer: module}} instead."
        )
    return numbers[0]


def _microbatch(counts: Any, sequences: Any, starts: Any) -> _Microbatch:
    given = {"counts": counts, "sequences": sequences, "starts": starts}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ConfigError(f"{name} is on {value.device}: give numbers on the host, so that nothing waits for the device.")
    count_i = np.asarray(counts, dtype=np.int64)
    sequence_i = np.arange(len(count_i)) if sequences is None else np.asarray(sequences, dtype=np.int64)
    start_i = np.cumsum(count_i) - count_i if starts is None else np.asarray(starts, dtype=np.int64)
    if not len(count_i) == len(sequence_i) == len(start_i) or not len(count_i):
        raise ConfigError(f"counts, sequences and starts have {len(count_i)}, {len(sequence_i)} and {len(start_i)} entries.")
    if min(count_i.min(), sequence_i.min(), start_i.min()) < 0 or len(np.unique(sequence_i)) != len(sequence_i):
        raise ConfigError("counts, sequences and starts must be at least 0, and no sequence named twice in a microbatch.")
    return _Microbatch(sequences=sequence_i, starts=start_i, counts=count_i, num_rows=int((start_i + count_i).max()))


def _sent_to_host(flat: Tensor) -> Tensor:
    """The host's copy, being filled: page-locked for a GPU, so that the copy runs by itself."""
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.device.type == "cuda")
    return host.copy_(flat, non_blocking=True)
