"""The bench windows, from the folder beside the repository (or ROUTEPACK_SHARED) that holds their generator and the trace."""

import importlib.util
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import routepack as rp

SHARED = Path(os.environ.get("ROUTEPACK_SHARED", Path(__file__).parents[2] / "shared"))
TRACES = {"dsv2lite": (8, 8, 2048), "dsv2lite-16": (16, 8, 1536)}  # W, R, max_tokens
SYNTHETIC = ("tiny", "small", "standard", "long", "hot", "large")
NAMES = (*SYNTHETIC, *TRACES)


def window(name, seed, cache=None):
    """(demand, topology, max_tokens) of a named window; synthetic ones are kept in the folder *cache*, where given."""
    if not (SHARED / "windows.py").exists():
        raise SystemExit(f"no bench windows at {SHARED}: set ROUTEPACK_SHARED to the folder that holds windows.py")
    if name in TRACES:
        ranks, experts, max_tokens = TRACES[name]
        batch = rp.load_trace(SHARED / "data/dsv2lite/routing.safetensors")
        demand = rp.RoutingDemandCollector().collect(batch)
    else:
        tensors, meta = _cached(name, seed, cache)
        ranks, experts, max_tokens = int(meta["dp"]), int(meta["ep"]), int(meta["max_tokens"])
        demand = rp.RoutingDemand(**tensors, top_k=int(meta["top_k"]), name=name)
    return demand, rp.Topology(data_parallel_degree=ranks, expert_parallel_degree=experts), max_tokens


def _cached(name, seed, cache):
    path = None if cache is None else Path(cache) / f"{name}-{seed}.safetensors"
    if path is not None and path.exists():
        with safe_open(path, framework="np") as file:
            return load_file(path), file.metadata()
    spec = importlib.util.spec_from_file_location("shared_windows", SHARED / "windows.py")
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    tensors, meta = windows.window(name, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=meta)
    return tensors, meta
