"""A config's model, built on the meta device and sharded for ranks of a fake process group of its true size.

    python sharded.py FILE

FILE holds [(key, config, overrides, ranks)], pickled; it is replaced by {key: {rank: facts}}. Everything is as on a GPU node,
with TorchTitan's fake_backend for the collectives; no parameter has any memory.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(file: Path) -> None:
    from routepack.core.config import load
    from routepack.torchtitan.launch.launch import experiment_of
    from routepack.torchtitan.model import cpu_device

    results: dict[str, dict[int, dict[str, Any]]] = {}
    with cpu_device.torchtitan_on_cpu():
        # Overrides and attention as on a GPU; nothing is computed.
        cpu_device.on_cpu = lambda: False
        for key, config, overrides, ranks in pickle.loads(file.read_bytes()):
            experiment = experiment_of(load([config], overrides))
            results[key] = {rank: in_a_process_of_its_own(facts_of, experiment, rank) for rank in ranks}
    file.write_bytes(pickle.dumps(results))


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    """Torch keeps a mesh's coordinate from one process group to the next, so that every rank would be the first one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def facts_of(experiment: Any, rank: int) -> dict[str, Any]:
    from torchtitan.config.configs import CommConfig
    from torchtitan.distributed import utils

    os.environ |= {name: str(experiment.num_ranks) for name in ("WORLD_SIZE", "NGPU")} | {"RANK": str(rank)}
    utils.init_distributed(CommConfig(mode="fake_backend"))
    return facts(*sharded(experiment))


def sharded(experiment: Any) -> tuple[Any, Any]:
    """The model of this rank and its meshes, as TorchTitan's Trainer makes them, but for memory and values."""
    import torch
    import torch.distributed as dist
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims, utils

    from routepack.torchtitan.trainer.torchtitan_config import config_fields
    from routepack.torchtitan.trainer.trainer import RoutePackTrainer

    config = RoutePackTrainer.Config(**config_fields(experiment.model, experiment.trainer))
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism, compile_config=config.compile,
        ac_config=config.activation_checkpoint, dump_folder="",
    )  # fmt: skip
    return model, dims


def facts(model: Any, dims: Any) -> dict[str, Any]:
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter

    from routepack.torchtitan.model import overrides
    from routepack.training.expert_moves import ShardLayout

    modules = list(model.modules())
    placed = overrides.placed_layers(model)
    return {
        "meshes": {name: mesh.size() for name, mesh in dims.get_all_one_dimensional_meshes().items()},
        "parameters": {
            canonical_fqn(name): {
                "shape": tuple(parameter.shape),
                "local": tuple(parameter.to_local().shape),
                "mesh": dict(zip(parameter.device_mesh.mesh_dim_names, parameter.device_mesh.shape, strict=True)),
                "splits": [placement.dim for placement in parameter.placements],
                "memory": parameter.to_local().device.type,
            }
            for name, parameter in model.named_parameters()
        },
        "routers": [type(module).__name__ for module in modules if isinstance(module, TokenChoiceTopKRouter)],
        "routed experts": [type(module).__name__ for module in modules if isinstance(module, RoutedExperts)],
        "attention": {type(module).__name__ for module in modules if isinstance(module, VarlenAttention)},
        "experts": {type(layer.inner_experts).__name__ for layer in placed},
        "rotary": sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("rope.cache")),
        "layouts": [
            (layout.rows_of_rank, layout.column_slices)
            for layout in (ShardLayout.of(weight) for layer in placed[:: len(placed) - 1] for weight in layer.parameters())
        ],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
