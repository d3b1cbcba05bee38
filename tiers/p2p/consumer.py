"""The pulling side: brings chunks from other pools into slots of this one.

Ownership. The pool owns its slots. Those that it hands over with `reserved` come back in exactly
one place: `Finished.commits`, `Finished.aborts`, or `Finished.doomed` and later one `AbortSlots`. A
slot under a running read is never given back before the transport has called that read terminal.

Lifecycle of a pull. Hello to the source (once per epoch), lease, reserve, read in batches, verify
each batch while the next is read, release, `Finished`. Nothing is committed whose bytes, after the
read, did not sum up to the checksum of the grant; therefore a lease that turns out to have been
LOST is counted and costs nothing else. The release goes out as soon as the last read is terminal.

Failure. Every pull finishes by its deadline, with what is verified by then. A source that says
nothing for `source_deadline_s` while an answer is due, or from which a read takes that long, is
suspect: all its pulls end at once, and it is not asked for `suspect_s`, nor while a read from it
still runs. A lost message of a source that said other things lately ends only the pull concerned. A
failed read, a refused connection and a message that makes no sense have the same effect as silence,
at once. `Stale` is followed by one hello; a second ends the pull. Answers to requests that are over
are ignored.

Bounds. Sources, pulls, keys in a pull, reads at once and requests are bounded; a pull beyond a
bound finishes BUSY.

Threading. One thread, no sockets, no clock: every method takes the time and returns what to do
(`actions`), to be carried out in order.
"""

from dataclasses import replace
from math import inf

from ...fabric.config import PeerConfig
from ...fabric.errors import Closed, Conservation, Malformed
from ...fabric.types import ANY_NODE, Chunk, Lookup, Released, Reserved
from ...fabric.wire import (
    BATCH_CHUNKS_MAX,
    Envelope,
    Grant,
    Hello,
    Lease,
    Release,
    ReleaseReply,
    Stale,
    Welcome,
)
from .actions import (
    AbortSlots,
    Action,
    Arrival,
    Finished,
    Landing,
    Pull,
    ReserveSlots,
    StartRead,
    StartVerify,
)
from .batches import Batches
from .records import (
    AskedKind,
    AskedRecord,
    ConsumerStats,
    PullRecord,
    PullState,
    ReadStage,
    SourceRecord,
    SourceState,
    answers,
    read_offers,
    usable,
)
from .sources import Outbox, Sources
from .transport import ReadState

PULLS_MAX = 256
"""Pulls at once. Each is a waiting request of an engine on this node."""
RELEASES_MAX = 1024
"""Releases of one source that wait for their answer; more are sent and not waited for."""


class PullConsumer:
    """All pulls of one pool, from all its sources. See the module's text."""

    def __init__(self, node: str, agent: bytes, slot_bytes: int, config: PeerConfig) -> None:
        self._node, self._slot_bytes, self._config = node, slot_bytes, config
        self._out = Outbox()
        self._batches = Batches()
        self._sources = Sources(Hello(node, agent), config, self._out, self._batches.agents)
        self._pulls: dict[int, PullRecord] = {}
        self._closed = False
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
            source = self._sources.use(pull.endpoint, now_s)
            if source is None:
                outcome = Lookup.BUSY
            elif source.state != SourceState.SUSPECT:
                record = PullRecord(pull, source, [Lookup.MISS] * len(pull.keys))
        if record is None:
            self._stats.busy += outcome == Lookup.BUSY
            self._out.emit(Finished(pull, (outcome,) * len(pull.keys), (), (), ()))
        else:
            self._pulls[pull.pull_id] = record.source.pulls[pull.pull_id] = record
            if record.source.state == SourceState.READY:
                self._lease(record, now_s)
        return self._out.take()

    def reserved(
        self, pull_id: int, places: tuple[Landing | Reserved, ...], now_s: float
    ) -> tuple[Action, ...]:
        """Answer `ReserveSlots`: per index a slot, or why there is none."""
        landings = tuple(place.ref for place in places if isinstance(place, Landing))
        record = self._pulls.get(pull_id)
        if record is None or record.state != PullState.RESERVING:
            if landings:
                self._out.emit(AbortSlots(pull_id, landings))
            return self._out.take()
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
        self._batches.enqueue(record)
        self._pump(now_s)
        return self._out.take()

    def on_message(self, endpoint: str, envelope: Envelope, now_s: float) -> tuple[Action, ...]:
        """Take a message of a source."""
        source = self._sources.get(endpoint)
        if source is None or source.state == SourceState.SUSPECT:
            self._stats.late += 1
            return self._out.take()
        source.heard_s = now_s
        asked = source.asked.get(envelope.request)
        if asked is None or not answers(asked.kind, envelope.body):
            self._stats.late += 1
            return self._out.take()
        del source.asked[envelope.request]
        if asked.kind == AskedKind.HELLO:
            self._on_hello_answer(source, envelope, now_s)
        elif asked.pull is not None:
            self._on_lease_answer(asked.pull, asked.asked_s, envelope, now_s)
        elif isinstance(envelope.body, ReleaseReply):
            self._stats.lost_leases += Released.LOST in envelope.body.statuses
        self._pump(now_s)
        return self._out.take()

    def on_read_done(self, read_id: int, state: ReadState, now_s: float) -> tuple[Action, ...]:
        """Answer `StartRead`: the read is terminal, and its slots are written no more."""
        read = self._batches.terminal(read_id)
        if read is None:
            return self._out.take()
        record, source = read.owner, read.owner.source
        if read.stage == ReadStage.DOOMED:
            self._batches.drop(read)
            refs = tuple(arrival.landing.ref for arrival in read.arrivals)
            self._out.emit(AbortSlots(record.pull.pull_id, refs))
        elif state == ReadState.DONE:
            source.heard_s = now_s
            read.stage = ReadStage.VERIFYING
            self._out.emit(StartVerify(read_id, read.arrivals))
            self._settle(record, now_s)
        else:
            self._batches.drop(read)
            self._stats.failed_reads += 1
            self._suspect(source, now_s)
        self._sources.remove_retired(source)
        self._pump(now_s)
        return self._out.take()

    def on_verified(
        self, read_id: int, checksums: tuple[int, ...], now_s: float
    ) -> tuple[Action, ...]:
        """Answer `StartVerify`: what each chunk sums up to."""
        read = self._batches.verified(read_id)
        if read is None:
            return self._out.take()
        record = read.owner
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
        return self._out.take()

    def on_connect_failed(self, endpoint: str, now_s: float) -> tuple[Action, ...]:
        """Answer `Connect` when it failed, or tell that the connection is gone."""
        source = self._sources.get(endpoint)
        if source is not None and source.state != SourceState.SUSPECT:
            self._suspect(source, now_s)
        return self._out.take()

    def tick(self, now_s: float) -> tuple[Action, ...]:
        """End what has run out of time."""
        for source in self._sources.all():
            if source.state != SourceState.SUSPECT:
                self._check_silence(source, now_s)
        for record in tuple(self._pulls.values()):
            lease_over = record.state == PullState.RESERVING and now_s >= record.lease_ends_s
            if lease_over or now_s >= record.pull.deadline_s:
                self._finish(record, now_s)
        self._pump(now_s)
        return self._out.take()

    def next_deadline_s(self) -> float:
        """Return when `tick` may have something to do; infinity if never."""
        deadline_s = self._sources.next_deadline_s()
        for record in self._pulls.values():
            deadline_s = min(deadline_s, record.pull.deadline_s)
            if record.to_read or record.state == PullState.RESERVING:
                deadline_s = min(deadline_s, record.lease_ends_s)
        return deadline_s

    def close(self, now_s: float) -> tuple[Action, ...]:
        """End all pulls and say bye. Doomed reads go on until they are terminal."""
        self._closed = True
        for source in self._sources.all():
            for record in tuple(source.pulls.values()):
                self._finish(record, now_s)
            if source.state != SourceState.SUSPECT:
                self._sources.leave(source, inf)
        return self._out.take()

    def stats(self) -> ConsumerStats:
        """Return a copy of the counts and gauges."""
        sources = self._sources.all()
        self._stats.sources = len(sources)
        self._stats.suspects = sum(source.state == SourceState.SUSPECT for source in sources)
        self._stats.pulls = len(self._pulls)
        self._stats.doomed_chunks = self._batches.doomed_chunks()
        return replace(self._stats)

    def check(self) -> None:
        """Raise `Conservation` if a bound or the bookkeeping of pulls and reads is broken."""
        sources = self._sources.all()
        if len(sources) > self._config.peers_max or len(self._pulls) > PULLS_MAX:
            raise Conservation("pulls", f"{len(self._pulls)} of {len(sources)} sources")
        at_sources = sum(len(source.pulls) for source in sources)
        if at_sources != len(self._pulls):
            raise Conservation("pulls", f"{len(self._pulls)}, at sources {at_sources}")
        self._batches.check(sources)
        for record in self._pulls.values():
            offered = sum(len(read.arrivals) for read in record.reads.values())
            if offered + len(record.to_read) > len(record.unverified):
                raise Conservation("chunks of a pull", f"{record.pull.pull_id}: {offered} read")

    def _on_hello_answer(self, source: SourceRecord, envelope: Envelope, now_s: float) -> None:
        welcome = envelope.body
        if not isinstance(welcome, Welcome):
            self._suspect(source, now_s, Lookup.BUSY)
            return
        if not usable(welcome) or welcome.node == self._node:
            self._stats.malformed += 1
            self._suspect(source, now_s)
            return
        self._sources.welcomed(source, envelope.epoch, welcome)
        for record in tuple(source.pulls.values()):
            if record.pull.node not in (ANY_NODE, welcome.node):
                self._finish(record, now_s)
            elif record.state == PullState.WAITING:
                self._lease(record, now_s)
            elif record.epoch != source.epoch and record.state != PullState.LEASING:
                record.lease_open = False
                record.lease_ends_s = now_s

    def _lease(self, record: PullRecord, now_s: float) -> None:
        source = record.source
        record.state, record.request = PullState.LEASING, self._out.next_request()
        record.epoch, record.lease_open = source.epoch, True
        source.asked[record.request] = AskedRecord(AskedKind.LEASE, now_s, record)
        body = Lease(record.pull.namespace, list(record.pull.keys), self._config.lease_s)
        self._out.send(source, record.request, body)

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
        self._out.emit(
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
            self._sources.greet(source, now_s)

    def _pump(self, now_s: float) -> None:
        for record in self._batches.start(now_s):
            if isinstance(record, PullRecord):
                self._settle(record, now_s)
            else:
                self._out.emit(StartRead(record.read_id, record.agent, record.arrivals))

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
        if not record.lease_open:
            return
        record.lease_open = False
        source.asked.pop(record.request, None)
        if source.state != SourceState.READY or source.epoch != record.epoch:
            return
        waiting = sum(asked.kind == AskedKind.RELEASE for asked in source.asked.values())
        if waiting < RELEASES_MAX:
            source.asked[record.request] = AskedRecord(AskedKind.RELEASE, now_s)
        self._out.send(source, record.request, Release(record.slots, record.generations))

    def _finish(self, record: PullRecord, now_s: float) -> None:
        if self._pulls.pop(record.pull.pull_id, None) is None:
            return
        del record.source.pulls[record.pull.pull_id]
        self._release(record, now_s)
        doomed = self._batches.end(record)
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
        self._out.emit(
            Finished(
                record.pull,
                tuple(record.outcomes),
                commits,
                tuple(aborts),
                tuple(arrival.landing.ref for arrival in doomed),
            )
        )

    def _check_silence(self, source: SourceRecord, now_s: float) -> None:
        if self._sources.is_silent(source, now_s):
            self._stats.silent += 1
            self._suspect(source, now_s)
            return
        for request, asked in self._sources.overdue(source, now_s):
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
        self._sources.part(source, now_s + self._config.suspect_s)
