"""Files are whole or absent, and nothing is replaced that a user would miss."""

import errno
import json
import math
import os

import pytest

from routepack.core.errors import ConfigError
from routepack.core.files import atomic_path, check_out, is_folder, read_history, write_json


def write_half(path, error):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_is_replaced_only_once_all_is_written(tmp_path):
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(ZeroDivisionError):
        write_half(out, ZeroDivisionError())
    assert out.read_text() == "old"
    with atomic_path(out) as path:
        path.write_text("new")
    assert out.read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with atomic_path(tmp_path / "link") as path:
        path.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


PLACES = ["", ".", "folder", "folder/", "missing/out", "x" * 300, "a\0b", "loop/out"]


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^cannot write"), atomic_path(name):
        pass
    if len(name) < 255:
        with pytest.raises(ConfigError, match=r"^cannot write"):
            check_out(name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "loop"]
    assert os.listdir(tmp_path / "folder") == []


def test_devices_and_pipes_are_no_places_to_write_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="no ordinary file"), atomic_path(path):
            pass


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc, a folder that takes no files")
def test_a_folder_that_takes_no_files_is_not_said_to_be_missing():
    with pytest.raises(ConfigError, match=r"cannot write /proc/p: .*: choose another folder"), atomic_path("/proc/p"):
        pass


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match="No space left"):
        write_half(tmp_path / "out", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert os.listdir(tmp_path) == []


def test_what_a_file_is_made_from_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("source", "folder/part.jsonl"):
        (tmp_path / name).write_text("kept")
    (tmp_path / "link").symlink_to("source")
    for out, source in (
        ("source", "source"),
        (tmp_path / "source", "source"),
        ("link", "source"),
        ("folder/part.jsonl", "folder"),
    ):
        with pytest.raises(ConfigError, match="would replace what it is made from"):
            check_out(out, "other", source)
    check_out("new", "source", "folder")
    check_out("new", "absent")
    check_out("folder/trace.safetensors", "folder")


def test_names_that_cannot_be_looked_up_are_no_folders(tmp_path):
    assert is_folder(tmp_path)
    assert not is_folder("x" * 300)
    assert not is_folder("a\0b")


def test_json_has_null_where_a_figure_is_not_finite(tmp_path):
    write_json(path := tmp_path / "history.json", [{"loss": 1.5, "policy_kl": math.inf, "clip": math.nan}])
    text = path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == [{"loss": 1.5, "policy_kl": None, "clip": None}]
    assert math.isnan(read_history(path)[0]["policy_kl"])
    assert read_history(tmp_path / "none.json") == []
