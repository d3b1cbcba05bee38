"""The rules of the pulling side, one by one."""

from math import inf, nan

import msgspec
import pytest

from kvfabric.fabric.config import PeerConfig
from kvfabric.fabric.errors import Closed, Conservation
from kvfabric.fabric.types import (
    ANY_NODE,
    Chunk,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    make_key,
)
from kvfabric.fabric.wire import (
    BATCH_CHUNKS_MAX,
    VERSION,
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
from kvfabric.tiers.p2p.actions import (
    AbortSlots,
    Arrival,
    Connect,
    Disconnect,
    Finished,
    Landing,
    Pull,
    RemovePeer,
    ReserveSlots,
    SendTo,
    StartRead,
    StartVerify,
)
from kvfabric.tiers.p2p.batches import READ_BATCH_BYTES_MAX, READS_PER_SOURCE_MAX
from kvfabric.tiers.p2p.consumer import PULLS_MAX, PullConsumer
from kvfabric.tiers.p2p.transport import ReadState

NAMESPACE = NamespaceId(b"n" * 16)
KEYS = tuple(make_key(index.to_bytes(16, "big"), 0) for index in range(200))
CONFIG = PeerConfig(lease_s=5.0, source_deadline_s=1.5, suspect_s=5.0, peers_max=2)
SLOT_BYTES = 4 << 20
CHUNK_BYTES = 2 << 20
BASE = 1 << 40
AGENT = b"agent of a"
EPOCH = 9
MEMORY = memoryview(bytearray(SLOT_BYTES))


def landing(index: int) -> Landing:
    return Landing(SlotRef(index, 1), index * SLOT_BYTES, MEMORY)


def grant_of(keys, **changes) -> Grant:
    count = len(keys)
    grant = Grant(
        [Lookup.HIT] * count, [0] * count, [index * CHUNK_BYTES for index in range(count)],
        [CHUNK_BYTES] * count, list(range(count)), [3] * count,
        [100 + index for index in range(count)], 5.0,
    )  # fmt: skip
    return msgspec.structs.replace(grant, **changes)


class Rig:
    """A consumer, its time, and a source as obliging as the test wants it."""

    def __init__(self) -> None:
        self.consumer = PullConsumer("b", b"agent of b", SLOT_BYTES, CONFIG)
        self.now_s = 0.0
        self.last = 0

    def note(self, actions):
        self.consumer.check()
        for action in actions:
            if isinstance(action, SendTo):
                self.last = action.request
        return list(actions)

    def want(self, pull_id=1, keys=2, *, node="a", endpoint="tcp://a", deadline_s=100.0):
        pull = Pull(pull_id, node, endpoint, NAMESPACE, KEYS[:keys], deadline_s)
        return self.note(self.consumer.want(pull, self.now_s))

    def hear(self, body, *, request=0, endpoint="tcp://a", epoch=EPOCH):
        envelope = Envelope(VERSION, epoch, request or self.last, body)
        return self.note(self.consumer.on_message(endpoint, envelope, self.now_s))

    def welcome(self, *, epoch=EPOCH, agent=AGENT, node="a", endpoint="tcp://a"):
        body = Welcome(node, agent, [BASE], [1 << 30], SLOT_BYTES)
        return self.hear(body, epoch=epoch, endpoint=endpoint)

    def reserve(self, pull_id, *places):
        return self.note(self.consumer.reserved(pull_id, places, self.now_s))

    def read(self, read_id, state=ReadState.DONE):
        return self.note(self.consumer.on_read_done(read_id, state, self.now_s))

    def verify(self, read_id, *checksums):
        return self.note(self.consumer.on_verified(read_id, checksums, self.now_s))

    def tick(self, now_s):
        self.now_s = now_s
        return self.note(self.consumer.tick(now_s))

    def leased(self, keys=2, *, deadline_s=100.0):
        """Take one pull to its lease."""
        self.want(keys=keys, deadline_s=deadline_s)
        return self.welcome()

    def reading(self, keys=2, *, deadline_s=100.0):
        """Take one pull to its first reads."""
        self.leased(keys, deadline_s=deadline_s)
        self.hear(grant_of(KEYS[:keys]))
        return self.reserve(1, *(landing(index) for index in range(keys)))


@pytest.fixture
def rig():
    return Rig()


def ended(actions) -> Finished:
    [finished] = [action for action in actions if isinstance(action, Finished)]
    return finished


def test_the_life_of_a_pull(rig):
    assert rig.want() == [
        Connect("tcp://a"),
        SendTo("tcp://a", 0, 1, Hello("b", b"agent of b")),
    ]
    assert rig.welcome() == [SendTo("tcp://a", EPOCH, 2, Lease(NAMESPACE, list(KEYS[:2]), 5.0))]
    [reserve] = rig.hear(grant_of(KEYS[:2]))
    assert isinstance(reserve, ReserveSlots)
    assert (reserve.indices, reserve.keys) == ((0, 1), list(KEYS[:2]))
    assert reserve.lengths == (CHUNK_BYTES, CHUNK_BYTES)
    arrivals = (
        Arrival(0, landing(5), BASE, CHUNK_BYTES, 100),
        Arrival(1, landing(6), BASE + CHUNK_BYTES, CHUNK_BYTES, 101),
    )
    assert rig.reserve(1, landing(5), landing(6)) == [StartRead(1, AGENT, arrivals)]
    assert rig.read(1) == [
        StartVerify(1, arrivals),
        SendTo("tcp://a", EPOCH, 2, Release([0, 1], [3, 3])),
    ]
    finished = ended(rig.verify(1, 100, 101))
    assert finished.outcomes == (Lookup.HIT, Lookup.HIT)
    assert finished.commits == (
        Chunk(KEYS[0], SlotRef(5, 1), CHUNK_BYTES, 100),
        Chunk(KEYS[1], SlotRef(6, 1), CHUNK_BYTES, 101),
    )
    assert finished.aborts == finished.doomed == ()
    assert rig.hear(ReleaseReply([Released.HELD, Released.LOST])) == []
    assert rig.consumer.stats().lost_leases == 1
    assert rig.consumer.next_deadline_s() == inf


def test_hello_is_said_once_for_all_pulls(rig):
    rig.want(1)
    assert rig.want(2) == []
    assert [type(action.body) for action in rig.welcome()] == [Lease, Lease]
    assert [type(action.body) for action in rig.want(3)] == [Lease]


def test_batches_are_bounded_and_overlap_with_verification(rig):
    chunks = READ_BATCH_BYTES_MAX // CHUNK_BYTES
    actions = rig.reading(3 * chunks)
    assert [len(action.arrivals) for action in actions] == [chunks] * READS_PER_SOURCE_MAX
    verify, read = rig.read(1)
    assert isinstance(verify, StartVerify)
    assert isinstance(read, StartRead)
    assert len(read.arrivals) == chunks


def test_pulls_of_one_source_take_turns(rig):
    chunks = READ_BATCH_BYTES_MAX // CHUNK_BYTES
    rig.reading(4 * chunks)
    rig.want(2)
    rig.hear(grant_of(KEYS[:2]))
    assert rig.reserve(2, landing(90), landing(91)) == []
    first = [action for action in rig.read(1) if isinstance(action, StartRead)]
    second = [action for action in rig.read(2) if isinstance(action, StartRead)]
    assert {len(action.arrivals) for action in first + second} == {chunks, 2}


def test_a_chunk_that_does_not_sum_up_is_a_miss(rig):
    rig.reading()
    rig.read(1)
    finished = ended(rig.verify(1, 100, 999))
    assert finished.outcomes == (Lookup.HIT, Lookup.MISS)
    assert [chunk.key for chunk in finished.commits] == [KEYS[0]]
    assert finished.aborts == (SlotRef(1, 1),)
    assert rig.consumer.stats().corrupt == 1


def test_slots_of_a_running_read_are_doomed_until_it_is_terminal(rig):
    rig.reading(deadline_s=1.0)
    assert rig.consumer.next_deadline_s() == 1.0
    (finished,) = (action for action in rig.tick(1.0) if isinstance(action, Finished))
    assert finished.outcomes == (Lookup.MISS, Lookup.MISS)
    assert (finished.aborts, finished.doomed) == ((), (SlotRef(0, 1), SlotRef(1, 1)))
    assert rig.consumer.stats().doomed_chunks == 2
    assert rig.read(1) == [AbortSlots(1, (SlotRef(0, 1), SlotRef(1, 1)))]
    assert rig.read(1) == []


def test_at_the_deadline_what_is_verified_counts(rig):
    chunks = READ_BATCH_BYTES_MAX // CHUNK_BYTES
    rig.reading(2 * chunks, deadline_s=1.0)
    rig.read(1)
    rig.verify(1, *(100 + index for index in range(chunks)))
    rig.read(2)
    actions = rig.tick(1.0)
    finished = ended(actions)
    assert finished.outcomes == (Lookup.HIT,) * chunks + (Lookup.MISS,) * chunks
    assert (len(finished.commits), len(finished.aborts)) == (chunks, chunks)
    assert rig.verify(2, *range(chunks)) == []


def test_a_silent_source_costs_one_deadline(rig):
    rig.want(1)
    rig.now_s = 1.4
    rig.want(2)
    assert rig.consumer.next_deadline_s() == 1.5
    actions = rig.tick(1.5)
    assert [action.pull.pull_id for action in actions if isinstance(action, Finished)] == [1, 2]
    assert Disconnect("tcp://a") in actions
    assert ended(rig.want(3)).outcomes == (Lookup.MISS, Lookup.MISS)
    assert rig.consumer.stats().suspects == 1
    rig.now_s = 6.4
    assert [type(action) for action in rig.want(4)] == [Finished]
    rig.now_s = 6.5
    assert [type(action) for action in rig.want(5)] == [Connect, SendTo]


def test_an_answer_just_after_the_question_is_no_sign_of_life(rig):
    rig.want(1)
    rig.welcome()
    lease = rig.last
    rig.hear(grant_of(KEYS[:2], statuses=[Lookup.MISS] * 2), request=lease)
    rig.want(2)
    rig.now_s = 0.1
    rig.hear(Ok(), request=lease)
    rig.tick(1.5)
    assert rig.consumer.stats().suspects == 1
    assert rig.consumer.stats().silent == 1


def test_a_source_is_not_asked_while_a_read_of_it_is_doomed(rig):
    rig.reading()
    finished = ended(rig.tick(1.5))
    assert len(finished.doomed) == 2
    rig.now_s = 100.0
    assert [type(action) for action in rig.want(2, deadline_s=200.0)] == [Finished]
    assert rig.read(1, ReadState.FAILED) == [
        AbortSlots(1, (SlotRef(0, 1), SlotRef(1, 1))),
        RemovePeer(AGENT),
    ]
    assert [type(action) for action in rig.want(3, deadline_s=200.0)] == [Connect, SendTo]


def test_a_failed_read_makes_its_source_suspect(rig):
    rig.reading()
    actions = rig.read(1, ReadState.FAILED)
    assert [type(action) for action in actions] == [Finished, Disconnect, RemovePeer]
    assert ended(actions).aborts == (SlotRef(0, 1), SlotRef(1, 1))


def test_a_lost_message_of_a_source_that_says_other_things_ends_one_pull(rig):
    rig.leased()
    first = rig.last
    rig.now_s = 1.0
    rig.want(2)
    rig.hear(grant_of(KEYS[:2]))
    actions = rig.tick(1.5)
    assert [type(action) for action in actions] == [SendTo, Finished]
    assert actions[0] == SendTo("tcp://a", EPOCH, first, Release([], []))
    assert ended(actions).pull.pull_id == 1
    assert rig.hear(grant_of(KEYS[:2]), request=first) == []
    assert rig.consumer.stats().late == 1


@pytest.mark.parametrize("body", [Ok(), grant_of(KEYS[:1]), Stale(), ReleaseReply([])])
def test_answers_to_nothing_are_ignored(rig, body):
    rig.leased()
    assert rig.hear(body, request=77) == []
    assert rig.hear(body, endpoint="tcp://nobody") == []
    assert rig.consumer.stats().late == 2


def test_stale_is_followed_by_one_hello(rig):
    rig.leased()
    [again] = rig.hear(Stale(), epoch=EPOCH + 1)
    assert isinstance(again.body, Hello)
    actions = rig.welcome(epoch=EPOCH + 1, agent=b"new agent")
    assert actions[0] == RemovePeer(AGENT)
    assert (actions[1].epoch, type(actions[1].body)) == (EPOCH + 1, Lease)
    assert ended(rig.hear(Stale())).outcomes == (Lookup.MISS, Lookup.MISS)


def test_a_restarted_source_is_read_no_further(rig):
    chunks = READ_BATCH_BYTES_MAX // CHUNK_BYTES
    rig.reading(4 * chunks)
    rig.want(2)
    rig.hear(Stale())
    rig.welcome(epoch=EPOCH + 1, agent=b"new agent")
    assert [type(action) for action in rig.read(1)] == [StartVerify]
    assert [type(action) for action in rig.read(2)] == [StartVerify, RemovePeer]
    rig.verify(1, *(100 + index for index in range(chunks)))
    finished = ended(rig.verify(2, *(100 + chunks + index for index in range(chunks))))
    assert finished.outcomes.count(Lookup.HIT) == 2 * chunks
    assert len(finished.aborts) == 2 * chunks


def test_nothing_is_read_after_the_lease(rig):
    chunks = READ_BATCH_BYTES_MAX // CHUNK_BYTES
    rig.leased(3 * chunks)
    rig.hear(grant_of(KEYS[: 3 * chunks], lease_s=1.0))
    rig.reserve(1, *(landing(index) for index in range(3 * chunks)))
    rig.now_s = 1.0
    assert [type(action) for action in rig.read(1)] == [StartVerify]


def test_a_lease_that_ends_before_the_slots_come_ends_the_pull(rig):
    rig.leased()
    rig.hear(grant_of(KEYS[:2], lease_s=1.0))
    assert rig.consumer.next_deadline_s() == 1.0
    assert ended(rig.tick(1.0)).outcomes == (Lookup.MISS, Lookup.MISS)
    assert rig.reserve(1, landing(0), landing(1)) == [AbortSlots(1, (SlotRef(0, 1), SlotRef(1, 1)))]
    assert rig.reserve(1, Reserved.BUSY, Reserved.BUSY) == []


def test_what_the_source_does_not_grant_is_said(rig):
    statuses = [Lookup.PENDING, Lookup.BUSY, Lookup.MISS]
    rig.leased(3)
    actions = rig.hear(grant_of(KEYS[:3], statuses=statuses))
    assert ended(actions).outcomes == tuple(statuses)
    assert len(actions) == 1


def test_what_this_pool_cannot_reserve_is_said(rig):
    rig.leased(3)
    rig.hear(grant_of(KEYS[:3]))
    [read] = rig.reserve(1, Reserved.PRESENT, landing(1), Reserved.PENDING)
    rig.read(read.read_id)
    finished = ended(rig.verify(read.read_id, 101))
    assert finished.outcomes == (Lookup.HIT, Lookup.HIT, Lookup.PENDING)
    assert len(finished.commits) == 1


def test_a_full_pool_is_busy_and_releases(rig):
    rig.leased()
    rig.hear(grant_of(KEYS[:2]))
    actions = rig.reserve(1, Reserved.BUSY, Reserved.BUSY)
    assert ended(actions).outcomes == (Lookup.BUSY, Lookup.BUSY)
    assert actions[0].body == Release([0, 1], [3, 3])


def test_a_chunk_without_checksum_is_not_pulled(rig):
    rig.leased()
    actions = rig.hear(grant_of(KEYS[:2], checksums=[0, 0]))
    assert ended(actions).outcomes == (Lookup.MISS, Lookup.MISS)
    assert actions[0].body == Release([0, 1], [3, 3])


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": [1]},
        {"segments": [0, 1]},
        {"segments": [0, -1]},
        {"lengths": [CHUNK_BYTES, SLOT_BYTES + 1]},
        {"lengths": [CHUNK_BYTES, 0]},
        {"offsets": [0, (1 << 30) - CHUNK_BYTES + 1]},
        {"offsets": [-1, 0]},
        {"lease_s": nan},
        {"lease_s": 0.0},
    ],
)
def test_a_grant_that_makes_no_sense_is_not_followed(rig, changes):
    rig.leased()
    actions = rig.hear(grant_of(KEYS[:2], **changes))
    assert ended(actions).outcomes == (Lookup.MISS, Lookup.MISS)
    assert rig.consumer.stats().malformed == 1
    assert rig.consumer.stats().suspects == 1


@pytest.mark.parametrize(
    "welcome",
    [
        Welcome("a", b"", [BASE], [1 << 30], SLOT_BYTES),
        Welcome("a", AGENT, [], [], SLOT_BYTES),
        Welcome("a", AGENT, [BASE], [], SLOT_BYTES),
        Welcome("b", AGENT, [BASE], [1 << 30], SLOT_BYTES),
    ],
)
def test_a_source_that_cannot_be_read_is_suspect(rig, welcome):
    rig.want()
    actions = rig.hear(welcome)
    assert [type(action) for action in actions] == [Finished, Disconnect]


def test_without_a_name_whoever_answers_is_asked(rig):
    rig.want(node=ANY_NODE)
    assert [type(action) for action in rig.welcome(node="c")] == [SendTo]


def test_another_node_at_the_endpoint_is_a_miss(rig):
    rig.want()
    assert [type(action) for action in rig.welcome(node="c")] == [Finished]


def test_a_refused_hello_is_busy(rig):
    rig.want()
    assert ended(rig.hear(Refused("peers_max", "1", "one more"))).outcomes[0] == Lookup.BUSY


def test_a_refused_lease_is_a_miss_and_no_suspicion(rig):
    rig.leased()
    assert ended(rig.hear(Refused("keys", "1", "2"))).outcomes[0] == Lookup.MISS
    assert rig.consumer.stats().suspects == 0


def test_a_grant_of_another_epoch_is_a_miss(rig):
    rig.leased()
    assert ended(rig.hear(grant_of(KEYS[:2]), epoch=EPOCH - 1)).outcomes[0] == Lookup.MISS


@pytest.mark.parametrize("case", [{"node": "b"}, {"deadline_s": 0.0}, {"keys": 0}])
def test_a_pull_that_cannot_be_ends_at_once(rig, case):
    [finished] = rig.want(**case)
    assert set(finished.outcomes) <= {Lookup.MISS}
    assert len(finished.outcomes) == case.get("keys", 2)


def test_pulls_sources_and_keys_are_bounded(rig):
    for pull_id in range(PULLS_MAX):
        rig.want(pull_id)
    [finished] = rig.want(PULLS_MAX)
    assert finished.outcomes == (Lookup.BUSY, Lookup.BUSY)
    rig = Rig()
    rig.want(1, endpoint="tcp://a")
    rig.want(2, endpoint="tcp://c")
    [finished] = rig.want(3, endpoint="tcp://d")
    assert finished.outcomes == (Lookup.BUSY, Lookup.BUSY)
    pull = Pull(4, "a", "tcp://a", NAMESPACE, KEYS[:1] * (BATCH_CHUNKS_MAX + 1), 9.0)
    [finished] = rig.consumer.want(pull, 0.0)
    assert finished.outcomes[0] == Lookup.BUSY
    assert rig.consumer.stats().busy == 2


def test_the_source_used_longest_ago_gives_way(rig):
    rig.leased()
    rig.hear(grant_of(KEYS[:2], statuses=[Lookup.MISS] * 2))
    rig.now_s = 1.0
    rig.want(2, endpoint="tcp://c")
    actions = rig.want(3, endpoint="tcp://d")
    assert [type(action) for action in actions] == [
        SendTo, Disconnect, RemovePeer, Connect, SendTo,
    ]  # fmt: skip
    assert isinstance(actions[0].body, Bye)


def test_a_failed_connection_is_suspect_at_once(rig):
    rig.want()
    actions = rig.note(rig.consumer.on_connect_failed("tcp://a", 0.1))
    assert [type(action) for action in actions] == [Finished, Disconnect]
    assert rig.consumer.on_connect_failed("tcp://a", 0.2) == ()
    assert rig.consumer.on_connect_failed("tcp://unknown", 0.2) == ()


def test_close_ends_everything_but_running_reads(rig):
    rig.reading()
    actions = rig.note(rig.consumer.close(1.0))
    assert [type(action) for action in actions] == [SendTo, Finished, SendTo, Disconnect]
    assert isinstance(actions[2].body, Bye)
    assert rig.read(1) == [AbortSlots(1, (SlotRef(0, 1), SlotRef(1, 1))), RemovePeer(AGENT)]
    with pytest.raises(Closed):
        rig.want(2)


def test_a_pull_id_is_used_once(rig):
    rig.want(1)
    with pytest.raises(Conservation):
        rig.want(1)
