"""Work on all cores: every piece once, and no error lost."""

import threading

import pytest

from routepack.core import threads
from routepack.core.threads import on_all_cores


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 7, 1000])
def test_every_piece_is_done_once(num_pieces):
    done = []
    on_all_cores(done.append, num_pieces)
    assert sorted(done) == list(range(num_pieces))


def test_several_threads_take_part(monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    meet = threading.Barrier(3, timeout=20)
    on_all_cores(lambda piece: meet.wait(), 3)


@pytest.mark.parametrize("piece", [0, 5])
def test_an_error_of_any_piece_is_raised(piece):
    def work(number):
        if number == piece:
            raise ValueError("piece")

    with pytest.raises(ValueError, match="piece"):
        on_all_cores(work, 6)
