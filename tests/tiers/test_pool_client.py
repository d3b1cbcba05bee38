"""The client against a server in this process: what it holds comes back, whatever goes wrong."""

import os
import warnings

import pytest
from pool_yard import CLOCK, GROUPS, NAMESPACE, chunk, keys, store, until

from kvfabric.fabric.config import PoolConfig
from kvfabric.fabric.errors import Closed, ConfigError, Malformed, Unavailable
from kvfabric.fabric.types import Lookup, Released, make_key
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
    with pytest.raises(Malformed, match="checksum 0"):
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


def gpu_chunks(pair: Pair) -> float:
    return pair.server.stats()["kvfabric_gpu_chunks"]


def test_what_is_on_the_gpu_is_the_pool_s_until_the_client_leaves(pair) -> None:
    pair.client.tell_gpu(keys(0, 3), [], whole=True)
    pair.client.tell_gpu(keys(7, 1), keys(0, 1), whole=False)
    assert gpu_chunks(pair) == 3
    pair.server.check()
    with pytest.raises(Malformed, match="group 9"):
        pair.client.tell_gpu([make_key(bytes(32), 9)], [], whole=False)
    pair.client.close()
    until(lambda: gpu_chunks(pair) == 0)


def test_who_must_tell_everything_again_is_called_when_it_has_attached(yard) -> None:
    pair = yard.kept(Pair(yard.config(host={"lease_s": 0.3})))
    pair.client.tell_gpu(keys(0, 3), [], whole=True)
    attached: list[int] = []
    pair.client.on_attach = lambda: attached.append(pair.client.attachments)
    pair.server.stop(unlink=False)
    pair.server = PoolServer(yard.config(host={"lease_s": 0.3}), CLOCK)
    pair.server.start()
    until(lambda: attached)  # nobody asks anything: the lease is renewed
    assert attached == [2]
    assert gpu_chunks(pair) == 0
    pair.client.tell_gpu(keys(0, 3), [], whole=True)
    assert gpu_chunks(pair) == 3


@pytest.mark.parametrize("endpoint", ["bogus", "/dev/shm/a.sock", "tcp://", ""])
def test_what_is_no_address_is_said_to_be_none(endpoint) -> None:
    with pytest.raises(ConfigError, match=r"addresses\.client"):
        PoolClient.attach(endpoint, NAMESPACE, GROUPS)


def test_what_the_pool_cannot_read_is_named_as_it_is(pair) -> None:
    with pytest.raises(Malformed, match=r"^key is malformed: 5 bytes"):
        pair.client.reserve([b"short"], [0])


def test_a_forked_process_is_refused_at_once_and_its_close_takes_nothing_from_the_parent(pair):
    store(pair.client, 0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the point is that others do it
        pid = os.fork()
    if pid == 0:
        os._exit(refused_calls(pair.client))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    ((status, held, _),) = pair.client.pin(keys(0, 1))
    assert status is Lookup.HIT
    assert pair.client.release([held.slot]) == [Released.HELD]


def refused_calls(client: PoolClient) -> int:
    """Return how many calls say that the client is of no use here; then close it."""
    refused = 0
    for call in (client.stats, lambda: client.pin(keys(0, 2)), lambda: store(client, 5, 1)):
        try:
            call()
        except Closed as error:
            refused += "inherited by a fork is closed. Open a new one." in str(error)
    client.close()
    return refused


def test_a_record_that_changed_under_a_pin_costs_its_chunk_alone(pair, monkeypatch) -> None:
    store(pair.client, 0, 3)
    refs = [chunk.slot for _, chunk, _ in pair.client.pin(keys(0, 3))]
    pair.client.release(refs)
    reader = pair.client._mapped()[1]
    honest = reader.generation
    monkeypatch.setattr(
        reader, "generation", lambda slot: honest(slot) + (1 if slot == refs[1].slot else 0)
    )
    into = [memoryview(bytearray(len(chunk(n)))) for n in range(3)]
    loaded = pair.client.load_bytes(keys(0, 3), into)
    assert loaded.statuses == (Lookup.HIT, Lookup.MISS, Lookup.HIT)
    assert pair.server.stats()["pinned"] == 0
