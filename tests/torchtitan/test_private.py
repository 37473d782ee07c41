"""Private names of torch and TorchTitan: used in one module, refused by name where they are missing."""

import ast
from pathlib import Path

import pytest
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.models import qwen3

from routepack.core.errors import ConfigError
from routepack.torchtitan.checkpoints.checkpoint import PlacedCheckpointManager
from routepack.torchtitan.model import private

SOURCE = Path(private.__file__).parents[2]
FILES = [path for room in ("torchtitan", "training") for path in (SOURCE / room).rglob("*.py")]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """The private names that a file makes: functions, methods, classes, fields, and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def foreign(sources):
    trees = [ast.parse(source) for source in sources]
    own = {name for tree in trees for name in defined(tree)}
    documented = {"_exit"}  # of os
    return sorted({name for tree in trees for name in used(tree) if is_private(name)} - own - documented)


def test_private_names_of_others_are_used_in_one_module_alone():
    sources = [path.read_text() for path in FILES if path.name != "private.py"]
    assert len(sources) > 25
    assert foreign(sources) == []


def test_such_a_name_would_be_found():
    sources = [
        "from torch.distributed.fsdp._fully_shard import FSDPModule",
        "def reshard(module): module._get_fsdp_state()._groups[0]._comm = None",
        "class Own:\n    def _mine(self): return self._mine()",
    ]
    assert foreign(sources) == ["_comm", "_fully_shard", "_get_fsdp_state", "_groups"]


def test_every_hook_that_is_overridden_is_looked_for():
    methods = [name for name, value in vars(PlacedCheckpointManager).items() if callable(value)]
    overridden = [name for name in methods if is_private(name) and hasattr(CheckpointManager, name)]
    assert sorted(overridden) == sorted(private.CHECKPOINT_HOOKS)


def test_a_missing_hook_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(CheckpointManager, "_should_save")
    with pytest.raises(ConfigError, match=r"CheckpointManager has no _should_save in torch .*tested with torch 2\.13 and"):
        private.check_checkpoint_hooks()


def test_a_missing_builder_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(qwen3, "_build_qwen3_moe_layers")
    with pytest.raises(ConfigError, match=r"torchtitan\.models\.qwen3 has no _build_qwen3_moe_layers in torch "):
        private.qwen3_moe_layers(n_layers=1)
