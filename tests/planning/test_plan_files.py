"""Plan files: whole ones come back as they were, all others are errors that name the file and what is wrong."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import routepack as rp
from routepack.core.errors import ConfigError, TraceError
from routepack.planning.plan_files import load_plan, save_plan
from routepack.testing import synthetic_batch
from routepack.traces.trace_files import save_trace


@pytest.fixture(scope="module")
def plan():
    planner = rp.Planner(
        topology=rp.Topology(data_parallel_degree=2, expert_parallel_degree=2),
        cost_model=rp.WindowNormalizedCost(),
        rerouter=rp.IdentityRerouter(),
        packer=rp.FirstFitPacker(max_tokens=256),
    )
    return planner.plan(synthetic_batch(num_sequences=12, max_length=60))


@pytest.fixture
def path(tmp_path, plan):
    save_plan(plan, tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def rewritten(path, change):
    """The file with *change* made to its JSON."""
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    header = json.loads(metadata["plan"])
    change(header)
    save_file(load_file(path), path, metadata=metadata | {"plan": json.dumps(header)})


def test_a_plan_comes_back_as_it_was(path, plan):
    again = load_plan(path)
    assert again.header() == plan.header()
    assert (again.packer, again.rerouter) == (plan.packer, plan.rerouter)
    assert again.packer.name.endswith("FirstFitPacker")
    assert again.content_digest() == plan.digest == again.digest
    np.testing.assert_array_equal(again.placement.physical_to_logical_LP, plan.placement.physical_to_logical_LP)
    for name in ("cell_of_S", "order_S"):
        np.testing.assert_array_equal(getattr(again.packing, name), getattr(plan.packing, name))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.safetensors cannot be read"):
        load_plan(tmp_path / "none.safetensors")


def test_a_file_of_another_format_is_named(tmp_path):
    save_trace(synthetic_batch(num_sequences=3), tmp_path / "t.safetensors")
    with pytest.raises(TraceError, match=r"format 'routepack.trace/1'; 'routepack.plan/1' is needed"):
        load_plan(tmp_path / "t.safetensors")


def test_a_plan_nested_without_end_is_a_trace_error(tmp_path):
    metadata = {"format": "routepack.plan/1", "plan": "[" * 200_000 + "]" * 200_000}
    save_file({"length": np.ones(1)}, tmp_path / "p.safetensors", metadata=metadata)
    with pytest.raises(TraceError, match=r"is not a whole routepack\.plan/1 file: its header is nested too deeply"):
        load_plan(tmp_path / "p.safetensors")


def test_saving_another_noun_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"plan='abc' is a str; give a Plan"):
        save_plan("abc", tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("value"), "its header lacks value"),
        (lambda header: header.pop("digest"), "its header lacks digest"),
        (lambda header: header.pop("num_microbatches"), "its header lacks num_microbatches"),
        (lambda header: header["topology"].pop("expert_parallel_degree"), "topology lacks expert_parallel_degree"),
        (lambda header: header.update(more=1), "its header has more, which no plan has"),
        (lambda header: header["certificate"].update(more=1), "certificate has more, which no plan has"),
        (lambda header: header["packer"].update(more=1), "packer has more, which no plan has"),
        (lambda header: header["rerouter"].pop("name"), "rerouter lacks name"),
        (lambda header: header.update(rules=[]), "rules is a list, no JSON object"),
        (lambda header: header.update(digest=""), "has lost the digest"),
        (lambda header: header.update(value="much"), r"plan\.value='much' must be a finite number"),
        (lambda header: header["topology"].update(ranks_per_node=[]), "ranks_per_node"),
    ],
)
def test_a_header_that_is_not_whole_is_a_named_error(path, change, message):
    rewritten(path, change)
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        load_plan(path)


def test_entries_with_a_default_may_be_missing(path, plan):
    """As in files that were written before there was such a field."""
    rewritten(path, lambda header: [header.pop(name) for name in ("rules", "kernel_seconds", "versions", "packer", "rerouter")])
    again = load_plan(path)
    assert again.rules == plan.rules
    assert again.packer is again.rerouter is None


@pytest.mark.parametrize("name", ["physical_to_logical", "cell_of_sequence", "order", "length"])
def test_a_missing_tensor_is_named(path, name):
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file({key: value for key, value in load_file(path).items() if key != name}, path, metadata=metadata)
    with pytest.raises(TraceError, match=rf"^{path} has no tensor '{name}'"):
        load_plan(path)
