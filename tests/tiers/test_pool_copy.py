"""The copier's threads: everything once, and nothing runs on after an error."""

import threading

import pytest

from kvfabric.tiers.pool.copy import Copier


@pytest.fixture
def copier():
    made = Copier(3)
    yield made
    made.close()


def test_every_piece_is_worked_on_once_and_answers_keep_their_places(copier) -> None:
    done: list[int] = []
    assert copier.map(lambda index: done.append(index) or index * 2, 500) == list(range(0, 1000, 2))
    assert sorted(done) == list(range(500))
    assert copier.map(lambda index: index, 0) == []


def test_after_an_error_nothing_runs_or_begins(copier) -> None:
    running: set[int] = set()
    begun: list[int] = []
    go_on = threading.Event()

    def work(index: int) -> int:
        begun.append(index)
        running.add(index)
        if index == 1:
            go_on.set()
            running.remove(index)
            raise ValueError("one")
        go_on.wait()
        running.remove(index)
        return index

    with pytest.raises(ValueError, match="one"):
        copier.map(work, 1000)
    assert not running
    number = len(begun)
    assert number < 1000
    copier.map(lambda index: index, 10)
    assert len(begun) == number
