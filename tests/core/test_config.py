import dataclasses
from dataclasses import dataclass

import pytest

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.config import build, check_keys, load
from routepack.core.errors import ConfigError


@dataclass(kw_only=True)
class Base:
    cap: int = 8


@dataclass(kw_only=True)
class Left(Base):
    left_only: float = 1.0


@dataclass(kw_only=True)
class Right(Base):
    right_only: str = "r"

    def __post_init__(self):
        if self.cap < 1:
            raise ConfigError(f"part.cap={self.cap} must be at least 1.")


LEFT, RIGHT = (f"{__name__}.{name}" for name in ("Left", "Right"))


def config_of(tmp_path, text, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load([path], overrides)


def test_later_files_and_overrides_win(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("part: {cap: 1}\nseed: 1\n")
    second.write_text("seed: 2\n")
    config = load([first, second], ["part.cap=3"])
    assert (config.part.cap, config.seed) == (3, 2)


@pytest.mark.parametrize("how", ["file", "override"])
def test_a_new_target_drops_the_old_options_but_keeps_inherited_ones(tmp_path, how):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(f"part: {{_target_: {LEFT}, cap: 5, left_only: 2.0}}\n")
    second.write_text(f"part: {{_target_: {RIGHT}}}\n")
    config = load([first, second]) if how == "file" else load([first], [f"part._target_={RIGHT}"])
    assert build(config, "part", base=Base) == Right(cap=5)


def test_build_checks_types_and_names_the_option(tmp_path):
    config = config_of(tmp_path, f"part: {{_target_: {LEFT}, cap: many}}")
    with pytest.raises(ConfigError, match=r"part\.cap='many'"):
        build(config, "part", base=Base)


def test_a_whole_number_may_be_written_as_yaml_reads_a_float(tmp_path):
    cap = build(config_of(tmp_path, f"part: {{_target_: {LEFT}, left_only: 2.0}}\n", "part.cap=1e9"), "part", base=Base).cap
    assert (cap, type(cap)) == (10**9, int)
    with pytest.raises(ConfigError, match=r"part\.cap=1\.5"):
        build(config_of(tmp_path, f"part: {{_target_: {LEFT}}}\n", "part.cap=1.5"), "part", base=Base)


def test_build_rejects_an_unknown_option_and_suggests_the_nearest(tmp_path):
    config = config_of(tmp_path, f"part: {{_target_: {LEFT}, cop: 2}}")
    with pytest.raises(ConfigError, match=r"part\.cop is no option of Left: did you mean cap\?.*left_only"):
        build(config, "part", base=Base)


def test_build_rejects_a_target_of_another_kind(tmp_path):
    config = config_of(tmp_path, f"part: {{_target_: {LEFT}}}")
    with pytest.raises(ConfigError, match="is not a RoutingDemandCollector"):
        build(config, "part", base=RoutingDemandCollector)


@pytest.mark.parametrize("target", ["nowhere.Thing", "Left", "routepack.core.Nothing", "''"])
def test_build_rejects_a_target_that_cannot_be_imported(tmp_path, target):
    config = config_of(tmp_path, f"part: {{_target_: {target}}}")
    with pytest.raises(ConfigError, match=r"part\._target_"):
        build(config, "part", base=Base)


def test_a_component_s_own_error_passes_through(tmp_path):
    config = config_of(tmp_path, f"part: {{_target_: {RIGHT}, cap: 0}}")
    with pytest.raises(ConfigError, match=r"part\.cap=0 must be at least 1"):
        build(config, "part", base=Base)


def test_a_value_left_open_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"part\.cap is not set"):
        build(config_of(tmp_path, "part: {cap: '???'}"), "part", base=Base)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "a: ]"])
def test_a_broken_file_is_a_config_error(tmp_path, text):
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        config_of(tmp_path, text)


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1"])
def test_a_malformed_override_is_a_config_error(override):
    with pytest.raises(ConfigError, match="key=value"):
        load([], [override])


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load([tmp_path / "none.yaml"])


def test_check_keys_names_the_nearest():
    with pytest.raises(ConfigError, match=r"sede is no option of this config: did you mean seed\?"):
        check_keys(["sede"], ["seed", "trace"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logged:
    """Has a text that is off where it is empty."""

    log: str = ""
    count: int = 1


@pytest.mark.parametrize("given", ["part.log=", "part.log=null", "part.log=''"])
def test_null_is_off_where_an_empty_text_is(given):
    assert build(load([], [given]), "part", base=Logged) == Logged()


@pytest.mark.parametrize("given", ["two", "null"])
def test_a_value_of_another_type_is_told_with_what_is_needed(given):
    value = "None" if given == "null" else "'two'"
    with pytest.raises(ConfigError, match=rf"part.count={value}: .*: a whole number is needed, or leave it out"):
        build(load([], [f"part.count={given}"]), "part", base=Logged)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Either:
    """Takes a number or a text, or neither."""

    what: int | str | None = None


@pytest.mark.parametrize(("given", "value"), [("3", 3), ("x", "x"), ("null", None)])
def test_an_option_of_several_types_takes_each(given, value):
    assert build(load([], [f"part.what={given}"]), "part", base=Either).what == value


def test_an_option_of_several_types_takes_no_other():
    with pytest.raises(ConfigError, match=r"part\.what=1\.5 is a float; give a int or str"):
        build(load([], ["part.what=1.5"]), "part", base=Either)
