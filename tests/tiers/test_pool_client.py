"""The client against a server in this process: what it holds comes back, whatever goes wrong."""

import pytest
from pool_yard import CLOCK, GROUPS, NAMESPACE, chunk, keys, store, until

from kvfabric.fabric.config import PoolConfig
from kvfabric.fabric.errors import Malformed, Unavailable, Unsupported
from kvfabric.fabric.types import Lookup, make_key
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.server import PoolServer


class Pair:
    """A server and a client of it."""

    def __init__(self, config: PoolConfig, timeout_s: float = 0.2) -> None:
        self.server = PoolServer(config, CLOCK)
        self.server.start()
        endpoint = self.server.addresses.client
        self.client = PoolClient.attach(endpoint, NAMESPACE, GROUPS, timeout_s=timeout_s)

    def close(self) -> None:
        self.client.close()
        self.server.stop(unlink=True)


@pytest.fixture
def pair(yard):
    made = Pair(yard.config())
    yield made
    made.close()


def test_a_key_of_a_group_that_was_not_named_pins_nothing(pair) -> None:
    store(pair.client, 0, 1)
    with pytest.raises(Malformed):
        pair.client.pin([*keys(0, 1), make_key(bytes(32), 9)])
    assert pair.server.stats()["pinned"] == 0


def test_a_checksum_that_the_pool_refuses_gives_the_slots_back(pair) -> None:
    with pytest.raises(Unsupported):
        pair.client.store(keys(0, 2), range(2), lambda _index, _slot: 0)
    pair.client.stats()
    assert pair.server.stats()["writing"] == 0
    store(pair.client, 0, 2)


def test_a_release_that_could_not_be_said_is_said_later(pair) -> None:
    store(pair.client, 0, 1)
    ((status, held, _),) = pair.client.pin(keys(0, 1))
    assert status is Lookup.HIT
    with pair.client._channel._turn, pytest.raises(Unavailable):
        pair.client.release([held.slot])
    pair.client.stats()
    assert pair.server.stats()["pinned"] == 0


def test_a_pool_that_comes_back_with_a_shorter_lease_is_renewed_in_time(yard) -> None:
    pair = yard.kept(Pair(yard.config()))
    store(pair.client, 0, 1)
    pair.server.stop(unlink=False)
    pair.server = PoolServer(yard.config(host={"lease_s": 0.3}), CLOCK)
    pair.server.start()
    ((status, held, _),) = pair.client.pin(keys(0, 1))
    assert status is Lookup.HIT
    begun_s = CLOCK.now_s()
    until(lambda: CLOCK.now_s() - begun_s > 0.5)
    assert pair.server.stats()["lapses"] == 0
    assert [one.name for one in pair.client.release([held.slot])] == ["HELD"]
    assert bytes(pair.client.view(held.slot, 8)) == chunk(0)[:8]
