"""The rules of the serving side, one by one."""

from dataclasses import dataclass, field
from math import inf, nan

import pytest

from kvfabric.fabric.config import PeerConfig
from kvfabric.fabric.types import (
    Chunk,
    Lookup,
    NamespaceId,
    Released,
    SlotRef,
    make_key,
)
from kvfabric.fabric.wire import (
    BATCH_CHUNKS_MAX,
    VERSION,
    Attach,
    Bye,
    Envelope,
    Grant,
    Hello,
    Lease,
    Ok,
    Refused,
    Release,
    ReleaseReply,
    Stale,
    Welcome,
)
from kvfabric.tiers.p2p.source import (
    ENDED_PER_PEER_MAX,
    GRANTS_PER_PEER_MAX,
    PEER_IDLE_S,
    Placed,
    PullSource,
    SourceDescription,
)
from kvfabric.tiers.p2p.transport import Segment

NAMESPACE = NamespaceId(b"n" * 16)
KEYS = [make_key(bytes([index]) * 16, 0) for index in range(6)]
EPOCH = 9
CONFIG = PeerConfig(lease_s=5.0, peers_max=2)
PEER = b"peer"


@dataclass
class Pins:
    """Holds the first three keys; the fourth is being written, for the fifth there is no room."""

    owners: dict[bytes, list[SlotRef]] = field(default_factory=dict)
    asked: int = 0

    def pin(self, owner, namespace, keys, lease_s, now_s):
        self.asked += 1
        assert owner not in self.owners
        others = {3: Lookup.PENDING, 4: Lookup.BUSY}
        answers = []
        for key in keys:
            index = key[0]
            if index < 3 and namespace == NAMESPACE:
                chunk = Chunk(key, SlotRef(index, 10 + index), 100 + index, 1000 + index)
                answers.append(Placed(chunk, 0, index * 4096))
            else:
                answers.append(others.get(index, Lookup.MISS))
        self.owners[owner] = [one.chunk.slot for one in answers if isinstance(one, Placed)]
        return answers

    def release(self, owner, refs):
        held = self.owners[owner]
        return [Released.HELD if ref in held else Released.LOST for ref in refs]

    def forget(self, owner):
        self.owners.pop(owner, None)


class Rig:
    def __init__(self) -> None:
        self.pins = Pins()
        self.source = PullSource(
            SourceDescription("a", EPOCH, b"agent", (Segment(1 << 20, 8192),), 4096),
            self.pins,
            CONFIG,
        )

    def say(self, body, *, peer=PEER, request=1, epoch=EPOCH, now_s=0.0):
        sends = self.source.handle(peer, Envelope(VERSION, epoch, request, body), now_s)
        self.source.check()
        for send in sends:
            assert (send.identity, send.epoch, send.request) == (peer, EPOCH, request)
        return [send.body for send in sends]

    def greet(self, peer=PEER, *, now_s=0.0, agent=b""):
        return self.say(Hello("b", agent), peer=peer, epoch=0, now_s=now_s)

    def lease(self, *keys, request=1, lease_s=5.0, now_s=0.0, peer=PEER):
        body = Lease(NAMESPACE, [KEYS[index] for index in keys], lease_s)
        return self.say(body, request=request, now_s=now_s, peer=peer)

    def release(self, *slots, request=1, now_s=0.0):
        body = Release(list(slots), [10 + slot for slot in slots])
        return self.say(body, request=request, now_s=now_s)


@pytest.fixture
def rig():
    rig = Rig()
    rig.greet()
    return rig


def test_hello_is_answered_with_the_segments():
    assert Rig().greet() == [Welcome("a", b"agent", [1 << 20], [8192], 4096)]


def test_a_lease_pins_and_says_where_until_when_and_why_not(rig):
    [grant] = rig.lease(0, 2, 3, 4, 5, lease_s=60.0)
    assert grant == Grant(
        [Lookup.HIT, Lookup.HIT, Lookup.PENDING, Lookup.BUSY, Lookup.MISS],
        [0, 0, 0, 0, 0],
        [0, 8192, 0, 0, 0],
        [100, 102, 0, 0, 0],
        [0, 2, 0, 0, 0],
        [10, 12, 0, 0, 0],
        [1000, 1002, 0, 0, 0],
        CONFIG.lease_s,
    )
    assert rig.source.has_grants
    assert rig.source.next_deadline_s() == CONFIG.lease_s
    assert rig.lease(1, request=2, lease_s=0.5, now_s=1.0)[0].lease_s == 0.5
    assert rig.source.next_deadline_s() == 1.5
    assert rig.source.stats().pinned_chunks == 3


def test_release_says_whether_it_held_and_frees_everything_of_its_lease(rig):
    rig.lease(0, 1, 2)
    body = Release([0, 2, 5], [10, 99, 15])
    assert rig.say(body) == [ReleaseReply([Released.HELD, Released.LOST, Released.LOST])]
    assert not rig.pins.owners
    assert not rig.source.has_grants


def test_two_leases_of_the_same_chunk_end_apart(rig):
    rig.lease(0)
    rig.lease(0, request=2)
    rig.release(0)
    assert len(rig.pins.owners) == 1
    assert rig.release(0, request=2) == [ReleaseReply([Released.HELD])]


def test_a_lease_ends_with_its_time_by_tick(rig):
    rig.lease(0)
    rig.source.tick(4.9)
    assert rig.pins.owners
    rig.source.tick(5.0)
    assert not rig.pins.owners
    assert rig.source.next_deadline_s() == inf
    assert rig.release(0, now_s=5.1) == [ReleaseReply([Released.LOST])]
    assert rig.source.stats().expired == 1


def test_a_release_after_the_end_is_lost_even_before_the_tick(rig):
    rig.lease(0)
    assert rig.release(0, now_s=5.0) == [ReleaseReply([Released.LOST])]
    assert not rig.pins.owners


def test_a_duplicate_lease_is_granted_once(rig):
    [first] = rig.lease(0, 1)
    [again] = rig.lease(0, 1, now_s=2.0)
    assert rig.pins.asked == 1
    assert (again.slots, again.lease_s) == (first.slots, 3.0)
    rig.release(0, 1, now_s=2.5)
    assert rig.lease(0, 1, now_s=3.0) == []
    assert not rig.pins.owners


def test_a_duplicate_release_gets_the_same_answer(rig):
    rig.lease(0)
    assert rig.release(0) == rig.release(0) == [ReleaseReply([Released.HELD])]


def test_a_release_cancels_a_lease_that_it_overtakes(rig):
    assert rig.say(Release([], []), request=7) == [ReleaseReply([])]
    assert rig.lease(0, request=7) == []
    assert not rig.pins.owners


def test_old_numbers_are_not_granted_once_they_are_forgotten(rig):
    for request in range(1, ENDED_PER_PEER_MAX + 3):
        rig.lease(0, request=request)
        rig.release(0, request=request)
    assert rig.lease(0, request=1) == []
    assert rig.release(0, request=1) == [ReleaseReply([Released.LOST])]
    assert rig.lease(0, request=1000) != []


@pytest.mark.parametrize("body", [Lease(NAMESPACE, [], 1.0), Release([], [])])
def test_a_wrong_epoch_and_an_unknown_peer_are_stale(rig, body):
    assert rig.say(body, epoch=EPOCH - 1) == [Stale()]
    assert rig.say(body, peer=b"other") == [Stale()]


def test_an_unknown_namespace_is_a_miss(rig):
    for namespace in (b"x" * 16, b"short"):
        [grant] = rig.say(Lease(namespace, [KEYS[0], b"k" * 99], 1.0), request=namespace[0])
        assert grant.statuses == [Lookup.MISS, Lookup.MISS]
    [grant] = rig.say(Lease(NAMESPACE, [b"k" * 99], 1.0), request=3)
    assert grant.statuses == [Lookup.MISS]
    assert not rig.source.has_grants


@pytest.mark.parametrize("lease_s", [0.0, -1.0, inf, nan])
def test_a_lease_without_a_proper_time_is_refused(rig, lease_s):
    assert rig.lease(0, lease_s=lease_s)[0].field == "lease_s"


def test_too_many_keys_are_refused(rig):
    [refused] = rig.say(Lease(NAMESPACE, [KEYS[0]] * (BATCH_CHUNKS_MAX + 1), 1.0))
    assert refused == Refused("keys", str(BATCH_CHUNKS_MAX), str(BATCH_CHUNKS_MAX + 1))


def test_columns_of_a_release_must_agree(rig):
    assert rig.say(Release([1], []))[0].field == "generations"


def test_leases_of_one_peer_are_bounded(rig):
    for request in range(GRANTS_PER_PEER_MAX):
        rig.lease(0, request=request + 1)
    [grant] = rig.lease(0, 5, request=GRANTS_PER_PEER_MAX + 1)
    assert grant.statuses == [Lookup.BUSY, Lookup.BUSY]


def test_peers_are_bounded_and_the_idle_give_way(rig):
    rig.greet(b"second", now_s=1.0)
    assert rig.greet(b"third", now_s=2.0) == [Refused("peers_max", "2", "one more")]
    rig.lease(0, lease_s=5.0, now_s=2.0)
    late_s = 1.0 + PEER_IDLE_S
    assert isinstance(rig.greet(b"third", now_s=late_s)[0], Welcome)
    assert rig.lease(0, peer=b"second", now_s=late_s) == [Stale()]
    assert rig.source.stats().peers == 2


def test_bye_frees_what_the_peer_held(rig):
    rig.lease(0)
    assert rig.say(Bye(), request=2) == [Ok()]
    assert not rig.pins.owners
    assert rig.say(Bye(), request=3) == [Ok()]


def test_a_second_hello_keeps_leases_unless_the_agent_is_another(rig):
    rig.lease(0)
    rig.greet()
    assert rig.pins.owners
    rig.greet(agent=b"restarted")
    assert not rig.pins.owners
    assert rig.lease(0) != []


def test_nobody_pulls_from_himself():
    assert Rig().say(Hello("a", b""), epoch=0)[0].field == "node"


def test_other_messages_are_refused(rig):
    assert rig.say(Attach("x", 1, 1, {}, []))[0].field == "message"


def test_close_frees_everything(rig):
    rig.lease(0)
    rig.source.close()
    assert not rig.pins.owners
    assert rig.lease(0) == [Stale()]
