"""Recorded windows on disk, and a config that trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import windows
from omegaconf import OmegaConf

from routepack.traces.trace_files import save_trace

CROSS_ENTROPY = {"_target_": "routepack.training.losses.CrossEntropyTokenLoss"}


def written_config(folder: Path, **changes: Any) -> str:
    """A config of two ranks, EP 2, and the tiny model."""
    config = {
        "windows": str(folder / "window*.safetensors"),
        "out": str(folder / "out"),
        "num_proposals": 500,
        "topology": {"data_parallel_degree": 2, "expert_parallel_degree": 2},
        "model": {"_target_": "routepack.torchtitan.model.models.TinyQwen3MoE", "vocab_size": windows.VOCAB_SIZE},
        "trainer": {
            "learning_rate": 0.01,
            "warmup_steps": 2,
            "checkpoint_interval": 2,
            "step_log": str(folder / "steps.jsonl"),
        },
        "loss": CROSS_ENTROPY,
        "packer": {"max_tokens": windows.MAX_TOKENS, "microbatch_multiple": 2},
        **changes,
    }
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return str(path)


def written_windows(folder: Path, num_windows: int) -> list[Path]:
    paths = [folder / f"window{number}.safetensors" for number in range(num_windows)]
    for number, path in enumerate(paths):
        save_trace(windows.window(number), path)
    return paths


def broken_folders(folder: Path) -> dict[str, str]:
    return {name: str(folder / f"broken_{name}") for name in ("lacking", "misshapen", "foreign", "truncated")}
