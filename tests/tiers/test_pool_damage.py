"""Damaged bytes, bad configurations, full regions and strange messages, with real pools."""

import os
import signal
import socket
import struct

import numpy as np
import pytest
import zmq
from pool_yard import (
    GROUPS,
    NAMESPACE,
    SLOT_BYTES,
    Yard,
    chunk,
    cpu_share,
    flip,
    flip_slot,
    key,
    keys,
    load,
    names,
    store,
    until,
)

from kvfabric.fabric import wire
from kvfabric.fabric.errors import Closed, ConfigError, NamespaceMismatch, Unsupported
from kvfabric.fabric.types import Reserved
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.process import this_process
from kvfabric.tiers.pool.sweep import sweep

pytestmark = pytest.mark.slow

FAILURES = 'kvfabric_checksum_failures_total{path="host"}'


@pytest.fixture(scope="module")
def shared():
    """A yard whose first pool serves the tests that leave it in good health."""
    yard = Yard()
    yard.pool()
    yield yard
    yard.close()


def test_a_flipped_bit_in_a_segment_is_a_miss_and_can_be_mended(yard) -> None:
    pool = yard.pool()
    client = yard.client(pool)
    store(client, 0, 8)
    flip_slot(yard.segment(), chunk(3))
    got = [status.name for status in load(client, 0, 8).statuses]
    assert got == ["HIT"] * 3 + ["MISS"] + ["HIT"] * 4
    stats = pool.stats()
    assert (stats["dropped"], stats[FAILURES], stats["ready"]) == (1, 1, 7)
    store(client, 3, 1)
    assert names(load(client, 0, 8)) == {"HIT"}
    pool.check()


def test_a_client_that_is_wrong_about_corruption_drops_nothing(shared) -> None:
    pool = shared.open[0]
    client = shared.client(pool, tenant="wrong")
    store(client, 0, 8)
    got = client.load(keys(0, 8), lambda index, slot, summed: summed ^ 1)
    assert names(got) == {"MISS"}
    stats = pool.stats()
    assert (stats["dropped"], stats.get(FAILURES, 0)) == (0, 0)
    assert names(load(client, 0, 8)) == {"HIT"}


def test_a_flipped_bit_in_a_record_costs_that_chunk_alone(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    store(yard.client(pool), 0, 8)
    pool.kill()
    control = yard.control()
    flip(control, control.read_bytes().index(key(5)) + 20)
    pool = yard.pool(config)
    client = yard.client(pool)
    got = [status.name for status in load(client, 0, 8).statuses]
    assert got == ["HIT"] * 5 + ["MISS"] + ["HIT"] * 2
    assert pool.stats()["free"] == 25
    store(client, 5, 1)
    pool.check()


@pytest.mark.parametrize("offset", [10, 4096 + 1000])
def test_a_corrupt_file_is_a_miss_and_is_stored_again(yard, tmp_path, offset) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 1 << 30}
    pool = yard.pool(slots=8, tiers=[tier])
    client = yard.client(pool)
    store(client, 0, 8)
    until(lambda: pool.stats()["fs_chunks"] == 8 and pool.stats()["pinned"] == 0)
    store(client, 100, 8)
    until(lambda: pool.stats()["pinned"] == 0)
    (record,) = tmp_path.rglob(f"{key(3).hex()}.kv")
    flip(record, offset)
    got = [status.name for status in load(client, 0, 8, wait_s=1.0).statuses]
    assert got == ["HIT"] * 3 + ["MISS"] + ["HIT"] * 4
    assert not record.exists()
    store(client, 3, 1)
    assert until(record.exists)
    pool.check()


def test_what_the_region_cannot_hold_comes_back_from_files(yard, tmp_path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 1 << 30}
    config = yard.config(slots=8, tiers=[tier])
    pool = yard.pool(config)
    client = yard.client(pool)
    for first in range(0, 64, 4):
        until(lambda: pool.stats()["pinned"] == 0)
        store(client, first, 4)
    until(lambda: pool.stats()["fs_chunks"] == 64)
    for first in range(0, 64, 8):
        got = load(client, first, 8, wait_s=1.0)
        assert names(got) == {"HIT"}
        assert set(got.origins) <= {"host", "fs"}
    pool.stop()
    pool = yard.pool(config)
    client = yard.client(pool)
    got = load(client, 8, 8, wait_s=1.0)
    assert (names(got), set(got.origins)) == ({"HIT"}, {"fs"})
    pool.check()


def test_a_region_full_of_pins_is_busy(yard) -> None:
    pool = yard.pool(slots=8)
    client = yard.client(pool)
    store(client, 0, 8)
    pinned = client.pin(keys(0, 8))
    got = client.store_bytes([key(9)], [0], [memoryview(chunk(9))])
    assert (got.reserved, got.committed) == ((Reserved.BUSY,), 0)
    client.release([one.slot for _, one, _ in pinned])
    store(client, 9, 1)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ({"region_bytes": 4096}, r"host\.region_bytes: .*no room for one chunk.*Enlarge"),
        ({"region_bytes": 1 << 46}, r"host\.region_bytes: the region needs \d+ bytes.*Lessen"),
        ({"directory": "/nowhere"}, r"host\.directory: /nowhere is not a directory.*Name one"),
    ],
)
def test_a_pool_that_cannot_start_says_why(yard, host, message) -> None:
    with pytest.raises(ConfigError, match=message):
        yard.pool(host=host)
    assert not yard.files()


def test_an_unknown_key_is_named(yard) -> None:
    with pytest.raises(ConfigError, match=r"host\.lease: .*See PoolConfig among the settings"):
        yard.config(host={"lease": 1})


def test_an_address_in_use_is_named(yard) -> None:
    pool = yard.pool()
    peers = {"transport": "none", "listen": pool.addresses.peer}
    with pytest.raises(ConfigError, match=r"tcp://.*cannot be bound.*Choose a free address"):
        yard.pool(node="b", peers=peers)
    assert {name for name in yard.files() if "-b." in name} == set()


def test_another_namespace_is_refused_with_its_field(yard) -> None:
    pool = yard.pool()
    store(yard.client(pool), 0, 1)
    with pytest.raises(NamespaceMismatch) as caught:
        yard.client(pool, kv_dtype="fp8")
    assert (caught.value.field, caught.value.theirs) == ("kv_dtype", "fp8")
    with pytest.raises(NamespaceMismatch, match="groups"):
        PoolClient.attach(pool.addresses.client, NAMESPACE, [wire.GroupGeometry(0, 16, 4096)])
    with pytest.raises(Unsupported, match="pipeline_parallel=2"):
        yard.client(pool, pipeline_parallel="2")
    big = [wire.GroupGeometry(0, 16, 2 * SLOT_BYTES)]
    with pytest.raises(Unsupported, match=r"host\.slot_bytes"):
        PoolClient.attach(pool.addresses.client, NAMESPACE, big)
    assert names(load(yard.client(pool, model="other"), 0, 1)) == {"MISS"}


def test_shutdown_leaves_nothing_even_with_a_client(yard) -> None:
    pool = yard.pool()
    client = yard.client(pool)
    store(client, 0, 4)
    ((_, pinned, _),) = client.pin([key(0)])
    assert {name.rsplit(".")[-1] for name in yard.files()} == {"control", "seg0", "sock"}
    os.kill(pool.pid, signal.SIGTERM)
    until(lambda: not pool.alive)
    assert not yard.files()
    assert client.view(pinned.slot, SLOT_BYTES) == chunk(0)


def test_sweep_removes_what_a_killed_pool_left_and_nothing_else(yard) -> None:
    dead, live = yard.pool(node="dead"), yard.pool(node="live")
    store(client := yard.client(live), 0, 1)
    dead.kill()
    assert len(yard.files()) == 6
    swept = sweep("/dev/shm", yard.run)
    assert {file.path.rsplit(".")[-1] for file in swept} == {"control", "seg0", "sock"}
    assert {name.rsplit("-")[-1] for name in yard.files()} == {
        "live.control",
        "live.seg0",
        "live.sock",
    }
    assert names(load(client, 0, 1)) == {"HIT"}


def test_a_closed_client_says_so(shared) -> None:
    pool = shared.open[0]
    client = shared.client(pool, tenant="closed")
    until(lambda: pool.stats()["pinned"] == 0)
    owners = pool.stats()["owners"]
    client.close()
    client.close()
    calls = [
        lambda: client.lookup(keys(0, 1)),
        lambda: client.pin(keys(0, 1)),
        lambda: client.reserve(keys(0, 1), [0]),
        lambda: client.stats(),
    ]
    for call in calls:
        with pytest.raises(Closed, match="the pool client is closed"):
            call()
    until(lambda: pool.stats()["owners"] == owners - 1)


def test_fill_that_fails_gives_all_slots_back(shared) -> None:
    pool = shared.open[0]
    client = shared.client(pool, tenant="fill")

    def fill(index: int, slot: memoryview) -> int:
        if index == 3:
            raise ZeroDivisionError
        slot[:] = chunk(index)
        return 1

    with pytest.raises(ZeroDivisionError):
        client.store(keys(0, 16), range(16), fill)
    assert pool.stats()["writing"] == 0
    pool.check()


def strange_messages() -> list[bytes]:
    pid, started = this_process()
    fields = NAMESPACE.fields()
    attach = wire.Attach("x", pid, started, fields, GROUPS)
    return [
        b"",
        b"\xff" * 100,
        os.urandom(1000),
        wire.encode(0, 1, wire.Attach("y", 0, started, fields, GROUPS)),
        wire.encode(0, 1, wire.Attach("y", -1, started, fields, GROUPS)),
        wire.encode(0, 1, wire.Attach("y", 1 << 40, started, fields, GROUPS)),
        wire.encode(0, 1, wire.Attach("y", pid, -5, fields, GROUPS)),
        wire.encode(0, 1, wire.Attach("z", pid, started, fields | {"more": "1"}, GROUPS)),
        wire.encode(0, 2, attach),
        wire.encode(0, 3, wire.Welcome("x", b"", [], [], 0)),
    ]


def attached_messages() -> list[wire.Message]:
    nan = float("nan")
    return [
        wire.Pin(b"", keys(0, 1), nan, []),
        wire.Pin(b"", [b"short"], 0.0, []),
        wire.Pin(b"", keys(7, 1), 0.2, [wire.SourceRangeWire("q", "nonsense://", -5, 1 << 40)]),
        wire.Reserve(b"", keys(0, 2), [0]),
        wire.Reserve(b"", keys(0, 1), [-1]),
        wire.Reserve(b"", [bytes(36 - 4) + b"\0\0\0\7"], [0]),
        wire.Commit([0, -1, 1 << 40], [1, 1, 1], [0, 0, 0]),
        wire.Commit([0], [1, 2], [5]),
        wire.Release([0, 99999], [1, 1]),
        wire.Abort([-1], [-1]),
        wire.Drop([5, 5, -3], [1, 1, 0]),
        wire.Lease(b"", keys(0, 1), nan),
        wire.Stale(),
    ]


def test_garbage_is_counted_and_harmless(shared) -> None:
    pool = shared.open[0]
    client = shared.client(pool, tenant="garbage")
    store(client, 0, 4)
    context = zmq.Context()
    for address in (pool.addresses.client, pool.addresses.peer, pool.addresses.replay):
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 500)
            dealer.connect(address)
            for message in strange_messages():
                dealer.send(message)
            dealer.send_multipart([b"", b"a", b"b"])
            for body in attached_messages():
                dealer.send(wire.encode(pool.addresses.epoch, 9, body))
    host, port = pool.addresses.peer.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stream:
        stream.sendall(struct.pack("<1000q", *np.random.default_rng(1).integers(0, 9, 1000)))
    for channel in ("client", "peer", "replay"):
        name = f'kvfabric_messages_refused_total{{channel="{channel}"}}'
        until(lambda name=name: pool.stats()[name] >= 3)
    context.term()
    stats = pool.stats()
    assert stats.get('kvfabric_loop_errors_total{loop="pool"}', 0) == 0
    assert names(load(client, 0, 4)) == {"HIT"}
    pool.check()
    assert cpu_share(pool) < 0.05
