"""What the live view shows, as text."""

import re

from rich.console import Console

from kvfabric.actors.demo.tally import Served, Tally
from kvfabric.actors.demo.view import View
from kvfabric.actors.engines.reference import Generated

POOL = {"free": 30, "writing": 0, "ready": 10, "quarantined": 0, "evictions": 3, "fs_chunks": 5}


def shown(view):
    console = Console(width=110)
    with console.capture() as taken:
        console.print(view)
    return taken.get()


def test_the_view_shows_pools_that_fill_hits_by_tier_pulls_and_news():
    tally = Tally()
    view = View(8, {"node-a": "2 prefill", "node-b": "2 decode"}, tally)
    assert re.search(r"node-a +2 prefill +down", shown(view))
    reused = {"host": 32, "fs": 64, "peer": 96}
    prefill = Generated([7], 1024, 832, reused, {}, 0.1, 0.2)
    tally.add(Served(0, 0, prefill, prefill, prefill, "node-a", "node-b", 0))
    view.pools = {"node-a": POOL | {"pull_chunks": 7}}
    view.tell("something happened")
    text = shown(view)
    assert "1/8" in text
    assert re.search(r"node-a +2 prefill +\S+ +25% +10 +3 +5 +7\s", text)
    assert re.search(r"node-b +2 decode +down", text)
    assert re.search(r"1,024 +832 +32 +64 +96 +18\.8%", text)
    assert "something happened" in text
