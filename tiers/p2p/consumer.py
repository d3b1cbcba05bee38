"""The pulling side: brings chunks from other pools into slots of this one.

Ownership. The pool owns its slots. Those that it hands over with `reserved` come back in exactly one
place: `Finished.commits`, `Finished.aborts`, or `Finished.doomed` and later one `AbortSlots`. A slot
under a running read is never given back before the transport has called that read terminal.

Lifecycle of a pull. Hello to the source (once per epoch), lease, reserve, read in batches, verify
each batch while the next is read, release, `Finished`. Nothing is committed whose bytes, after the
read, did not sum up to the checksum of the grant; therefore a lease that turns out to have been LOST
is counted and costs nothing else. The release goes out as soon as the last read is terminal.

Failure. Every pull finishes by its deadline, with what is verified by then. A source gives no answer
(or a read no end) for `source_deadline_s`: it is suspect, all its pulls end at once, and it is not
asked for `suspect_s`, nor while a read from it still runs. A lost message of a source that answers
others ends only the pull concerned. A failed read, a refused connection and a message that makes no
sense have the same effect as silence, at once. `Stale` is followed by one hello; a second ends the
pull. Answers to requests that are over are ignored.

Bounds. Sources, pulls, keys in a pull, reads at once and requests are bounded; a pull beyond a bound
finishes BUSY.

Threading. One thread, no sockets, no clock: every method takes the time and returns what to do
(`actions`), to be carried out in order.
"""

from collections import deque
from dataclasses import dataclass, replace
from math import inf

from ...fabric.config import PeerConfig
from ...fabric.errors import Closed, Conservation, Malformed
from ...fabric.types import Chunk, Lookup, Released, Reserved
from ...fabric.wire import (
    BATCH_CHUNKS_MAX,
    Bye,
    Envelope,
    Grant,
    Hello,
    Lease,
    Message,
    Refused,
    Release,
    ReleaseReply,
    Stale,
    Welcome,
)
from .actions import (
    AbortSlots,
    Action,
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
from .records import (
    AskedKind,
    AskedRecord,
    PullRecord,
    PullState,
    ReadRecord,
    ReadStage,
    SourceRecord,
    SourceState,
    read_offers,
    usable,
)
from .transport import ReadState

READ_BATCH_BYTES_MAX = 32 << 20
"""One read. A copy through the kernel blocks the caller for 6 ms at the 5.7 GB/s measured."""
READ_BATCH_CHUNKS_MAX = 256
"""The same for small chunks: describing more would take longer than copying them."""
READS_PER_SOURCE_MAX = 2
"""One on the wire and one ready behind it; more gains nothing and delays other sources."""
READS_MAX = 8
"""Reads of all sources whose pulls are not over: what the machine's links can keep busy."""
PULLS_MAX = 256
"""Pulls at once. Each is a waiting request of an engine on this node."""
RELEASES_MAX = 1024
"""Releases of one source that wait for their answer; more are sent and not waited for."""


@dataclass(slots=True)
class ConsumerStats:
    """Counts since the start, and the gauges of now."""

    sources: int = 0
    suspects: int = 0
    pulls: int = 0
    doomed_chunks: int = 0
    chunks: int = 0
    bytes: int = 0
    corrupt: int = 0
    lost_leases: int = 0
    silent: int = 0
    failed_reads: int = 0
    unanswered: int = 0
    late: int = 0
    malformed: int = 0
    stale: int = 0
    busy: int = 0


class PullConsumer:
    """All pulls of one pool, from all its sources. See the module's text."""

    def __init__(self, node: str, agent: bytes, slot_bytes: int, config: PeerConfig) -> None:
        self._node, self._agent, self._slot_bytes, self._config = node, agent, slot_bytes, config
        self._sources: dict[str, SourceRecord] = {}
        self._pulls: dict[int, PullRecord] = {}
        self._reads: dict[int, ReadRecord] = {}
        self._readers: deque[PullRecord] = deque()
        """Pulls that have chunks to read, in turn."""
        self._closed = False
        self._request = 0
        self._read_id = 0
        self._actions: list[Action] = []
        self._stats = ConsumerStats()

    def want(self, pull: Pull, now_s: float) -> tuple[Action, ...]:
        """Start a pull. It may finish at once. Raises `Closed`."""
        if self._closed:
            raise Closed("the puller of peers")
        if pull.pull_id in self._pulls:
            raise Conservation("pulls", f"{pull.pull_id} is used twice")
        record = None
        outcome = Lookup.MISS
        if len(self._pulls) >= PULLS_MAX or len(pull.keys) > BATCH_CHUNKS_MAX:
            outcome = Lookup.BUSY
        elif pull.keys and pull.node != self._node and now_s < pull.deadline_s:
            source = self._source(pull.endpoint, now_s)
            if source is None:
                outcome = Lookup.BUSY
            elif source.state != SourceState.SUSPECT:
                record = PullRecord(pull, source, [Lookup.MISS] * len(pull.keys))
        if record is None:
            self._stats.busy += outcome == Lookup.BUSY
            self._emit(Finished(pull, (outcome,) * len(pull.keys), (), (), ()))
        else:
            self._pulls[pull.pull_id] = record.source.pulls[pull.pull_id] = record
            if record.source.state == SourceState.READY:
                self._lease(record, now_s)
        return self._take()

    def reserved(
        self, pull_id: int, places: tuple[Landing | Reserved, ...], now_s: float
    ) -> tuple[Action, ...]:
        """Answer `ReserveSlots`: per index a slot, or why there is none."""
        landings = tuple(place.ref for place in places if isinstance(place, Landing))
        record = self._pulls.get(pull_id)
        if record is None or record.state != PullState.RESERVING:
            if landings:
                self._emit(AbortSlots(pull_id, landings))
            return self._take()
        outcome_of = {
            Reserved.PRESENT: Lookup.HIT,
            Reserved.PENDING: Lookup.PENDING,
            Reserved.BUSY: Lookup.BUSY,
        }
        for offer, place in zip(record.offers, places, strict=True):
            if isinstance(place, Landing):
                arrival = Arrival(
                    offer.index, place, offer.remote_address, offer.length_bytes, offer.checksum
                )
                record.to_read.append(arrival)
                record.unverified[offer.index] = arrival
            else:
                record.outcomes[offer.index] = outcome_of[place]
        record.state = PullState.READING
        self._readers.append(record)
        self._pump(now_s)
        self._settle(record, now_s)
        return self._take()

    def on_message(self, endpoint: str, envelope: Envelope, now_s: float) -> tuple[Action, ...]:
        """Take a message of a source."""
        source = self._sources.get(endpoint)
        if source is None or source.state == SourceState.SUSPECT:
            self._stats.late += 1
            return self._take()
        source.heard_s = now_s
        asked = source.asked.get(envelope.request)
        if asked is None or not _answers(asked.kind, envelope.body):
            self._stats.late += 1
            return self._take()
        del source.asked[envelope.request]
        if asked.kind == AskedKind.HELLO:
            self._on_hello_answer(source, envelope, now_s)
        elif asked.pull is not None:
            self._on_lease_answer(asked.pull, asked.asked_s, envelope, now_s)
        elif isinstance(envelope.body, ReleaseReply):
            self._stats.lost_leases += Released.LOST in envelope.body.statuses
        self._pump(now_s)
        return self._take()

    def on_read_done(self, read_id: int, state: ReadState, now_s: float) -> tuple[Action, ...]:
        """Answer `StartRead`: the read is terminal, and its slots are written no more."""
        read = self._reads.get(read_id)
        if read is None or read.stage == ReadStage.VERIFYING:
            return self._take()
        record, source = read.owner, read.owner.source
        del source.reads[read_id]
        if read.stage == ReadStage.DOOMED:
            del self._reads[read_id]
            refs = tuple(arrival.landing.ref for arrival in read.arrivals)
            self._emit(AbortSlots(record.pull.pull_id, refs))
        elif state == ReadState.DONE:
            source.heard_s = now_s
            read.stage = ReadStage.VERIFYING
            self._emit(StartVerify(read_id, read.arrivals))
            self._settle(record, now_s)
        else:
            del self._reads[read_id], record.reads[read_id]
            self._stats.failed_reads += 1
            self._suspect(source, now_s)
        self._remove_retired(source)
        self._pump(now_s)
        return self._take()

    def on_verified(
        self, read_id: int, checksums: tuple[int, ...], now_s: float
    ) -> tuple[Action, ...]:
        """Answer `StartVerify`: what each chunk sums up to."""
        read = self._reads.get(read_id)
        if read is None or read.stage != ReadStage.VERIFYING:
            return self._take()
        record = read.owner
        del self._reads[read_id], record.reads[read_id]
        for arrival, found in zip(read.arrivals, checksums, strict=True):
            del record.unverified[arrival.index]
            if found == arrival.checksum:
                record.verified.append(arrival)
                record.outcomes[arrival.index] = Lookup.HIT
                self._stats.chunks += 1
                self._stats.bytes += arrival.length_bytes
            else:
                record.aborts.append(arrival.landing.ref)
                self._stats.corrupt += 1
        self._settle(record, now_s)
        return self._take()

    def on_connect_failed(self, endpoint: str, now_s: float) -> tuple[Action, ...]:
        """Answer `Connect` when it failed, or tell that the connection is gone."""
        source = self._sources.get(endpoint)
        if source is not None and source.state != SourceState.SUSPECT:
            self._suspect(source, now_s)
        return self._take()

    def tick(self, now_s: float) -> tuple[Action, ...]:
        """End what has run out of time."""
        for source in self._sources.values():
            if source.state != SourceState.SUSPECT:
                self._check_silence(source, now_s)
        for record in tuple(self._pulls.values()):
            lease_over = record.state == PullState.RESERVING and now_s >= record.lease_ends_s
            if lease_over or now_s >= record.pull.deadline_s:
                self._finish(record, now_s)
        self._pump(now_s)
        return self._take()

    def next_deadline_s(self) -> float:
        """Return when `tick` may have something to do; infinity if never."""
        wait_s = self._config.source_deadline_s
        deadline_s = inf
        for record in self._pulls.values():
            deadline_s = min(deadline_s, record.pull.deadline_s)
            if record.to_read or record.state == PullState.RESERVING:
                deadline_s = min(deadline_s, record.lease_ends_s)
        for source in self._sources.values():
            if source.state == SourceState.SUSPECT:
                continue
            for asked in source.asked.values():
                deadline_s = min(deadline_s, asked.asked_s + wait_s)
            for read in source.reads.values():
                deadline_s = min(deadline_s, read.started_s + wait_s)
        return deadline_s

    def close(self, now_s: float) -> tuple[Action, ...]:
        """End all pulls and say bye. Doomed reads go on until they are terminal."""
        self._closed = True
        for source in self._sources.values():
            for record in tuple(source.pulls.values()):
                self._finish(record, now_s)
            if source.state != SourceState.SUSPECT:
                self._send(source, self._next_request(), Bye())
                self._part(source, inf)
        return self._take()

    def stats(self) -> ConsumerStats:
        """Return a copy of the counts and gauges."""
        self._stats.sources = len(self._sources)
        self._stats.suspects = sum(
            source.state == SourceState.SUSPECT for source in self._sources.values()
        )
        self._stats.pulls = len(self._pulls)
        self._stats.doomed_chunks = sum(
            len(read.arrivals) for read in self._reads.values() if read.stage == ReadStage.DOOMED
        )
        return replace(self._stats)

    def check(self) -> None:
        """Raise `Conservation` if a bound or the bookkeeping of pulls and reads is broken."""
        if len(self._sources) > self._config.peers_max or len(self._pulls) > PULLS_MAX:
            raise Conservation("pulls", f"{len(self._pulls)} of {len(self._sources)} sources")
        at_sources = sum(len(source.pulls) for source in self._sources.values())
        if at_sources != len(self._pulls):
            raise Conservation("pulls", f"{len(self._pulls)}, at sources {at_sources}")
        running = {
            read_id for read_id, read in self._reads.items() if read.stage != ReadStage.VERIFYING
        }
        held = {read_id for source in self._sources.values() for read_id in source.reads}
        if running != held:
            raise Conservation("running reads", f"{sorted(running)}, at sources {sorted(held)}")
        for record in self._pulls.values():
            offered = sum(len(read.arrivals) for read in record.reads.values())
            if offered + len(record.to_read) > len(record.unverified):
                raise Conservation("chunks of a pull", f"{record.pull.pull_id}: {offered} read")

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _take(self) -> tuple[Action, ...]:
        actions = tuple(self._actions)
        self._actions.clear()
        return actions

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    def _send(self, source: SourceRecord, request: int, body: Message) -> None:
        self._emit(SendTo(source.endpoint, source.epoch, request, body))

    def _source(self, endpoint: str, now_s: float) -> SourceRecord | None:
        """Return the source of an endpoint, greeted anew if need be; None if all are in use."""
        source = self._sources.get(endpoint)
        if source is None:
            if len(self._sources) >= self._config.peers_max and not self._drop_unused(now_s):
                return None
            source = self._sources[endpoint] = SourceRecord(endpoint, now_s)
        elif source.state != SourceState.SUSPECT or now_s < source.suspect_until_s or source.reads:
            source.used_s = now_s
            return source
        source.used_s = now_s
        self._emit(Connect(endpoint))
        self._greet(source, now_s)
        return source

    def _drop_unused(self, now_s: float) -> bool:
        unused = [
            source for source in self._sources.values() if not source.pulls and not source.reads
        ]
        if not unused:
            return False
        source = min(unused, key=lambda candidate: candidate.used_s)
        if source.state != SourceState.SUSPECT:
            self._send(source, self._next_request(), Bye())
            self._part(source, now_s)
        del self._sources[source.endpoint]
        return True

    def _greet(self, source: SourceRecord, now_s: float) -> None:
        source.state = SourceState.GREETING
        request = self._next_request()
        source.asked[request] = AskedRecord(AskedKind.HELLO, now_s)
        self._send(source, request, Hello(self._node, self._agent))

    def _on_hello_answer(self, source: SourceRecord, envelope: Envelope, now_s: float) -> None:
        welcome = envelope.body
        if not isinstance(welcome, Welcome):
            self._suspect(source, now_s, Lookup.BUSY)
            return
        if not usable(welcome) or welcome.node == self._node:
            self._stats.malformed += 1
            self._suspect(source, now_s)
            return
        if source.welcome is not None and source.welcome.agent != welcome.agent:
            source.retired.add(source.welcome.agent)
        source.retired.discard(welcome.agent)
        self._remove_retired(source)
        source.state, source.epoch, source.welcome = SourceState.READY, envelope.epoch, welcome
        for record in tuple(source.pulls.values()):
            if record.pull.node != welcome.node:
                self._finish(record, now_s)
            elif record.state == PullState.WAITING:
                self._lease(record, now_s)
            elif record.epoch != source.epoch and record.state != PullState.LEASING:
                record.lease_open = False
                record.lease_ends_s = now_s

    def _lease(self, record: PullRecord, now_s: float) -> None:
        source = record.source
        record.state, record.request = PullState.LEASING, self._next_request()
        record.epoch, record.lease_open = source.epoch, True
        source.asked[record.request] = AskedRecord(AskedKind.LEASE, now_s, record)
        body = Lease(record.pull.namespace, list(record.pull.keys), self._config.lease_s)
        self._send(source, record.request, body)

    def _on_lease_answer(
        self, record: PullRecord, asked_s: float, envelope: Envelope, now_s: float
    ) -> None:
        source, grant = record.source, envelope.body
        if isinstance(grant, Stale):
            self._on_stale(record, now_s)
            return
        if not isinstance(grant, Grant) or source.welcome is None or envelope.epoch != record.epoch:
            record.lease_open = False
            self._finish(record, now_s)
            return
        try:
            offers = read_offers(source.welcome, grant, len(record.outcomes), self._slot_bytes)
        except Malformed:
            self._stats.malformed += 1
            self._suspect(source, now_s)
            return
        hits = [index for index, status in enumerate(grant.statuses) if status == Lookup.HIT]
        record.outcomes = [
            Lookup.MISS if status == Lookup.HIT else status for status in grant.statuses
        ]
        record.slots = [grant.slots[index] for index in hits]
        record.generations = [grant.generations[index] for index in hits]
        record.lease_open = bool(hits)
        record.lease_ends_s = asked_s + grant.lease_s
        record.offers, record.state = offers, PullState.RESERVING
        if not offers or source.epoch != record.epoch or now_s >= record.lease_ends_s:
            self._finish(record, now_s)
            return
        self._emit(
            ReserveSlots(
                record.pull,
                tuple(offer.index for offer in offers),
                tuple(offer.length_bytes for offer in offers),
            )
        )

    def _on_stale(self, record: PullRecord, now_s: float) -> None:
        self._stats.stale += 1
        record.lease_open = False
        if record.stale_seen:
            self._finish(record, now_s)
            return
        record.stale_seen = True
        source = record.source
        if source.state == SourceState.READY and source.epoch != record.epoch:
            self._lease(record, now_s)
            return
        record.state = PullState.WAITING
        if source.state == SourceState.READY:
            self._greet(source, now_s)

    def _pump(self, now_s: float) -> None:
        """Start the reads that may start, one batch per pull in turn."""
        running = sum(read.stage == ReadStage.RUNNING for read in self._reads.values())
        idle = 0
        while idle < len(self._readers):
            record = self._readers.popleft()
            if now_s >= record.lease_ends_s:
                record.to_read.clear()
            if not record.to_read:
                self._settle(record, now_s)
                continue
            self._readers.append(record)
            if running < READS_MAX and len(record.source.reads) < READS_PER_SOURCE_MAX:
                self._start_read(record, now_s)
                running += 1
                idle = 0
            else:
                idle += 1

    def _start_read(self, record: PullRecord, now_s: float) -> None:
        source = record.source
        if source.welcome is None:
            raise Conservation("reads", f"{source.endpoint} has not said how it can be read")
        batch: list[Arrival] = []
        size_bytes = 0
        while record.to_read and len(batch) < READ_BATCH_CHUNKS_MAX:
            size_bytes += record.to_read[0].length_bytes
            if batch and size_bytes > READ_BATCH_BYTES_MAX:
                break
            batch.append(record.to_read.popleft())
        self._read_id += 1
        read = ReadRecord(self._read_id, record, source.welcome.agent, tuple(batch), now_s)
        self._reads[read.read_id] = record.reads[read.read_id] = read
        source.reads[read.read_id] = read
        self._emit(StartRead(read.read_id, read.agent, read.arrivals))

    def _settle(self, record: PullRecord, now_s: float) -> None:
        """Release the lease when nothing is left to read; finish when nothing is left to verify."""
        if record.state != PullState.READING or record.to_read or record.running():
            return
        self._release(record, now_s)
        if not record.reads:
            self._finish(record, now_s)

    def _release(self, record: PullRecord, now_s: float) -> None:
        """End the lease at the source; cancel it if there is no grant yet."""
        source = record.source
        source.asked.pop(record.request, None)
        if not record.lease_open:
            return
        record.lease_open = False
        if source.state != SourceState.READY or source.epoch != record.epoch:
            return
        waiting = sum(asked.kind == AskedKind.RELEASE for asked in source.asked.values())
        if waiting < RELEASES_MAX:
            source.asked[record.request] = AskedRecord(AskedKind.RELEASE, now_s)
        self._send(source, record.request, Release(record.slots, record.generations))

    def _finish(self, record: PullRecord, now_s: float) -> None:
        if self._pulls.pop(record.pull.pull_id, None) is None:
            return
        del record.source.pulls[record.pull.pull_id]
        if record in self._readers:
            self._readers.remove(record)
        self._release(record, now_s)
        doomed: list[Arrival] = []
        for read in record.reads.values():
            if read.stage == ReadStage.RUNNING:
                read.stage = ReadStage.DOOMED
                doomed += read.arrivals
            else:
                del self._reads[read.read_id]
        for arrival in doomed:
            del record.unverified[arrival.index]
        aborts = record.aborts + [arrival.landing.ref for arrival in record.unverified.values()]
        commits = tuple(
            Chunk(
                record.pull.keys[arrival.index],
                arrival.landing.ref,
                arrival.length_bytes,
                arrival.checksum,
            )
            for arrival in record.verified
        )
        self._stats.busy += Lookup.BUSY in record.outcomes
        self._emit(
            Finished(
                record.pull,
                tuple(record.outcomes),
                commits,
                tuple(aborts),
                tuple(arrival.landing.ref for arrival in doomed),
            )
        )

    def _check_silence(self, source: SourceRecord, now_s: float) -> None:
        wait_s = self._config.source_deadline_s
        stuck = any(now_s >= read.started_s + wait_s for read in source.reads.values())
        overdue = [
            (request, asked)
            for request, asked in source.asked.items()
            if now_s >= asked.asked_s + wait_s
        ]
        if stuck or any(
            asked.kind == AskedKind.HELLO or source.heard_s <= asked.asked_s for _, asked in overdue
        ):
            self._stats.silent += 1
            self._suspect(source, now_s)
            return
        for request, asked in overdue:
            self._stats.unanswered += 1
            source.asked.pop(request, None)
            if asked.pull is not None:
                self._finish(asked.pull, now_s)

    def _suspect(self, source: SourceRecord, now_s: float, outcome: Lookup = Lookup.MISS) -> None:
        """End all pulls of a source, with `outcome` where there is no better one yet."""
        source.state = SourceState.SUSPECT
        for record in tuple(source.pulls.values()):
            if record.state == PullState.WAITING:
                record.outcomes = [outcome] * len(record.outcomes)
            self._finish(record, now_s)
        self._part(source, now_s + self._config.suspect_s)

    def _part(self, source: SourceRecord, until_s: float) -> None:
        source.state, source.suspect_until_s = SourceState.SUSPECT, until_s
        source.asked.clear()
        if source.welcome is not None:
            source.retired.add(source.welcome.agent)
            source.welcome = None
        self._emit(Disconnect(source.endpoint))
        self._remove_retired(source)

    def _remove_retired(self, source: SourceRecord) -> None:
        in_use = {read.agent for read in self._reads.values() if read.stage != ReadStage.VERIFYING}
        for agent in sorted(source.retired - in_use):
            source.retired.remove(agent)
            self._emit(RemovePeer(agent))


def _answers(kind: AskedKind, body: Message) -> bool:
    if kind == AskedKind.HELLO:
        return isinstance(body, Welcome | Refused)
    if kind == AskedKind.LEASE:
        return isinstance(body, Grant | Stale | Refused)
    return isinstance(body, ReleaseReply | Stale | Refused)
