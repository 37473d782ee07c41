"""Options of the planner that follow from the model and trainer sections of a training config, so that none is given twice."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from routepack.core.component import option_types
from routepack.core.config import TARGET, locate
from routepack.core.errors import ConfigError
from routepack.cost.calibration import MeasuredCost
from routepack.cost.models import num_packed_groups
from routepack.planning.from_config import COMPONENTS
from routepack.planning.planner import Planner
from routepack.torchtitan.model.models import moe_layer_ids
from routepack.torchtitan.trainer.memory import BYTES
from routepack.torchtitan.trainer.settings import TrainerSettings


def derived_options(spec: ModelSpec, trainer: TrainerSettings) -> dict[str, dict[str, Any]]:
    """By section, the options that follow from what is trained and how."""
    model = cast(Decoder.Config, spec.model)
    hidden_dim = model.layers[moe_layer_ids(spec)[0]].moe.routed_experts.inner_experts.hidden_dim
    recompute = trainer.activation_checkpoint == "full"
    return {
        "cost_model": {"recompute": recompute},
        # A routed row is dispatched and combined, forward and backward, and once more where the layer is recomputed.
        "links": {"dim": model.dim, "traversals": 6 if recompute else 4},
        # Gate, up and down projection; a weight travels with two moments as large.
        "move_policy": {
            "parameters_per_expert": 3 * model.dim * hidden_dim,
            "bytes_per_parameter": 3 * BYTES[trainer.storage_dtype],
        },
    }


def with_derived_options(config: DictConfig, spec: ModelSpec, trainer: TrainerSettings) -> DictConfig:
    """A copy of *config* with every derived option that its sections have and do not set, and with ``sync``."""
    filled = config.copy()
    if filled.get("sync") is None:
        filled["sync"] = trainer.gather
    for section, options in derived_options(spec, trainer).items():
        path = OmegaConf.select(config, f"{section}.{TARGET}")
        target = COMPONENTS[section][1] if path is None else locate(path, where=section)
        for name in options.keys() & option_types(target).keys() if callable(target) else ():
            if OmegaConf.select(config, f"{section}.{name}") is None:
                OmegaConf.update(filled, f"{section}.{name}", options[name])
    return filled


def check_sync(planner: Planner, gather: str) -> None:
    """Raise ConfigError where plans are made for ranks that wait for each other at other moments than the trainer's do.

    With one EP group all moments are the same. A measured cost model comes with the ``sync`` that predicted its steps best.
    """
    if planner.sync == gather or num_packed_groups(planner.topology) == 1 or isinstance(planner.cost_model, MeasuredCost):
        return
    other = f", or set trainer.gather={planner.sync}" if planner.sync in ("layer", "step") else ""
    raise ConfigError(
        f"sync={planner.sync} contradicts trainer.gather={gather}, which makes the ranks wait for each other once a {gather}: "
        f"leave sync out, as it follows from trainer.gather{other}."
    )
