"""The table of tiles, and a file in place of its entries."""

import json

import pytest

from routepack.triton_kernels import tile_configs as configs

TILE = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Write a file of configs and make it the one in use."""

    def use(content):
        path = tmp_path / "configs.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(configs.CONFIG_FILE, str(path))
        configs.shipped_or_given.cache_clear()
        return path

    yield use
    monkeypatch.delenv(configs.CONFIG_FILE, raising=False)
    configs.shipped_or_given.cache_clear()


def test_every_architecture_has_every_kernel():
    architectures = {arch for arch, _, _ in configs.TABLE}
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= architectures
    assert all((arch, kernel, configs.LARGE) in configs.TABLE for arch in architectures for kernel in configs.KERNELS)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_86", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_103", "sm_100"),
        ("sm_120", "sm_80"),
        ("gfx950", "gfx942"),
        ("sm_90", "sm_90"),
    ],
)
def test_an_architecture_without_entries_takes_its_nearest(arch, expected):
    assert configs.nearest(arch) == expected


def test_a_file_replaces_its_entries_and_no_others(given):
    given({"sm_90": {"down_forward": {"large": TILE}}})
    assert configs.config_for("down_forward", "sm_90", 1000.0) == configs.KernelConfig(**TILE)
    assert configs.config_for("down_forward", "sm_90", 10.0) == configs.TABLE["sm_90", "down_forward", configs.SMALL]
    assert configs.config_for("gate_up_forward", "sm_90", 1000.0) == configs.TABLE["sm_90", "gate_up_forward", configs.LARGE]


def test_what_is_written_is_read_back(tmp_path):
    configs.write_configs(tmp_path / "table.json", configs.TABLE)
    assert configs.read_configs(tmp_path / "table.json") == configs.TABLE


def test_a_new_architecture_needs_every_kernel(given):
    given({"sm_110": {kernel: {"large": TILE} for kernel in configs.KERNELS}})
    assert configs.config_for("down_forward", "sm_110", 10.0) == configs.KernelConfig(**TILE)
    given({"sm_110": {"down_forward": {"large": TILE}}})
    with pytest.raises(ValueError, match="sm_110 is new to the table and lacks large entries for gate_up_forward"):
        configs.config_for("down_forward", "sm_110", 10.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ({"sm_90": {"down": {"large": TILE}}}, "no such kernel"),
        ({"sm_90": {"down_forward": {"medium": TILE}}}, "no such row class"),
        ({"sm_90": {"down_forward": {"large": {"BM": 64}}}}, "give BK, BM, BN, num_stages, num_warps"),
        ({"sm_90": {"down_forward": {"large": TILE | {"waves": 2}}}}, "waves"),
        ({"sm_90": {"down_forward": {"large": TILE | {"BM": 96}}}}, "BM=96"),
        ({"sm_90": {"down_forward": {"large": TILE | {"num_warps": 0}}}}, "num_warps=0"),
        ({"sm_90": {"down_forward": {"large": TILE | {"SPLIT": 8}}}}, "SPLIT=8"),
        ([], "is list; give an object of architectures"),
        ("null", "is NoneType; give an object of architectures"),
        ({"sm_90": []}, "sm_90 is list; give an object of kernels"),
        ({"sm_90": {"down_forward": 4}}, "sm_90 down_forward is int; give an object of row classes"),
        ({"sm_90": {"down_forward": {"large": [1]}}}, "large is list; give an object of options"),
        ({"sm_90": {"down_forward": {"large": TILE | {"BM": 8}}}}, "BM=8; the kernels' products take at least 16"),
        ({"sm_90": {"down_forward": {"large": TILE | {"BM": True}}}}, "BM=True; give a whole number"),
        ({"sm_90": {"down_forward": {"large": TILE | {"num_warps": 64}}}}, "num_warps=64; a program has at most 32"),
        ({"sm_90": {"down_backward": {"large": TILE | {"BN": 32, "SPLIT": 4}}}}, "BN=32 in SPLIT=4 pieces"),
        ({"sm90": {"down_forward": {"large": TILE}}}, "'sm90' is no architecture: name it as sm_90 or gfx942"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_entry(given, content, message):
    given(content)
    with pytest.raises(ValueError, match=message):
        configs.config_for("down_forward", "sm_90", 1000.0)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "configs.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        configs.read_configs(path)
