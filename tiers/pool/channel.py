"""The wire between a client and its pool: one question at a time, and what is owed for lost ones.

Ownership. A channel owns one socket. It knows the pool's epoch and attaches again by itself when
the pool has become another. An answer that came too late may have granted something: a channel
gives it back as soon as the pool answers again (`owe` and `owe_pins` let its user add to that).

Failure. `ask` ends within its time: with the answer, or with `Unavailable`. While it waits it asks
now and then whether the pool is still the same, which also keeps the leases alive; a question that
a pool took to its grave is asked again of the next one.

Threading. Any thread may ask; they take turns. A process that was forked from the channel's own may
not: its copy of the socket is the parent's, and the threads behind it are not there.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import zmq

from ...fabric.clock import Clock
from ...fabric.errors import (
    Closed,
    ConfigError,
    Malformed,
    NamespaceMismatch,
    Unavailable,
    Unsupported,
)
from ...fabric.types import Lookup, Reserved, SlotRef
from ...fabric.wire import (
    Abort,
    Attach,
    Attached,
    Detach,
    Envelope,
    Message,
    PinReply,
    Refused,
    Release,
    Renew,
    ReserveReply,
    Stale,
    decode,
    encode,
)

PROBE_S = 0.2
"""An answer that takes longer has a slow tier or peer, or a dead pool, behind it."""
SILENT_WAIT_S = 0.2
"""For an answer of a pool that has just kept somebody waiting in vain: a dead pool costs an engine
one whole deadline, and not one for each request."""
RECONNECT_MS = 20
RECONNECT_MAX_MS = 200
"""A pool that restarts is back within a second: to look five times a second costs nothing."""
LINGER_MS = 100
"""For the farewell to reach the pool, which otherwise learns of it when the process ends."""


class Remapped(IntEnum):
    """Whether the memory behind a pool that was attached to is the one known before."""

    SAME = 0
    OTHER = 1
    """What was reserved or pinned in it is gone with it."""


class Channel:
    """Speaks with one pool. See the module's text."""

    def __init__(
        self,
        endpoint: str,
        attach: Attach,
        on_attached: Callable[[Attached], Remapped],
        clock: Clock,
    ) -> None:
        self.endpoint = endpoint
        self._attach = attach
        self._on_attached = on_attached
        self._clock = clock
        self._turn = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                "endpoint",
                f"{endpoint!r} is no address of a pool ({error.strerror})",
                "Give the pool's `addresses.client`, which begins with ipc://",
            ) from error
        self._request = 0
        self._epoch = 0
        self._silent = False
        """Whether the last question got no answer, and nothing was heard since."""
        self._memory = 0
        """Counts the memories that were mapped: references mean nothing in another."""
        self._owed_slots: deque[SlotRef] = deque()
        """Granted, and not to be written any more. No more than the pool has slots."""
        self._owed_pins: deque[SlotRef] = deque()
        """Of this epoch: no more than were granted in it."""

    def open(self, wait_s: float) -> Attached:
        """Attach. Raises `NamespaceMismatch`, `Unsupported` or `Unavailable`."""
        with self._turn:
            return self._attach_locked(self._clock.now_s() + wait_s, wait_s)

    def ask(self, body: Message, wait_s: float) -> Message:
        """Return the answer.

        Raises `Unavailable`, `Malformed` or `Unsupported` if refused, or `Closed`.
        """
        self._require_own_process()
        if self._silent:
            wait_s = min(wait_s, SILENT_WAIT_S)
        deadline_s = self._clock.now_s() + wait_s
        if not self._turn.acquire(timeout=wait_s):
            raise self._unavailable(wait_s)
        try:
            if self._closed:
                raise Closed("the pool client")
            reply = self._ask_locked(body, deadline_s, wait_s)
            with suppress(Unavailable):
                self._pay_locked(deadline_s, wait_s)
        finally:
            self._turn.release()
        if isinstance(reply, Refused):
            if not reply.ours:
                raise Malformed(reply.field, reply.theirs)
            raise Unsupported(reply.field, reply.ours, reply.theirs)
        return reply

    def owe(self, refs: Sequence[SlotRef]) -> None:
        """Slots that were reserved will not be written any more: say so when the pool answers.

        Does not wait for its turn.
        """
        self._owed_slots.extend(refs)

    def owe_pins(self, refs: Sequence[SlotRef]) -> None:
        """Pins are not needed any more: say so when the pool answers. Does not wait for its turn.

        A pin that was given back in time after all may be given back twice: if another thread has
        pinned the same slot meanwhile, its release says LOST.
        """
        self._owed_pins.extend(refs)

    def close(self) -> None:
        """Say goodbye. Safe to call twice, and in a forked process, where it says nothing."""
        if os.getpid() != self._pid:
            return
        with self._turn:
            if self._closed:
                return
            self._closed = True
            with suppress(zmq.Again):
                self._socket.send(encode(self._epoch, 0, Detach()), zmq.NOBLOCK)
            self._socket.close(linger=LINGER_MS)
            self._context.term()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise Closed("the pool client that this process inherited by a fork")

    def _ask_locked(self, body: Message, deadline_s: float, wait_s: float) -> Message:
        while True:
            reply = self._exchange(body, deadline_s, wait_s).body
            if not isinstance(reply, Stale):
                return reply
            self._attach_locked(deadline_s, wait_s)

    def _attach_locked(self, deadline_s: float, wait_s: float) -> Attached:
        envelope = self._exchange(self._attach, deadline_s, wait_s)
        reply = envelope.body
        if isinstance(reply, Refused):
            if reply.field in self._attach.namespace or reply.field == "groups":
                raise NamespaceMismatch(reply.field, reply.ours, reply.theirs)
            raise Unsupported(reply.field, reply.theirs, reply.ours)
        if not isinstance(reply, Attached):
            raise Malformed("attach", f"the pool answered {type(reply).__name__}")
        self._epoch = envelope.epoch
        self._owed_pins.clear()
        if self._on_attached(reply) is Remapped.OTHER:
            self._memory += 1
            self._owed_slots.clear()
        return reply

    def _pay_locked(self, deadline_s: float, wait_s: float) -> None:
        for owed, message in ((self._owed_slots, Abort), (self._owed_pins, Release)):
            refs = [owed.popleft() for _ in range(len(owed))]
            if not refs:
                continue
            memory = self._memory
            try:
                self._ask_locked(message(*columns(refs)), deadline_s, wait_s)
            except Unavailable:
                if memory == self._memory:
                    owed.extend(refs)
                raise

    def _exchange(self, body: Message, deadline_s: float, wait_s: float) -> Envelope:
        """Send one message and return its answer."""
        asked = self._send(body, wait_s)
        probed = asked
        while (left_s := deadline_s - self._clock.now_s()) > 0:
            if not self._socket.poll(int(min(left_s, PROBE_S) * 1000) + 1):
                if self._epoch and not isinstance(body, Attach):
                    probed = self._send(Renew(), wait_s)
                continue
            envelope = decode(self._socket.recv())
            self._silent = False
            lost = probed == envelope.request and isinstance(envelope.body, Stale)
            if envelope.request in (asked, 0) or lost:
                return envelope
            self._take_late(envelope)
        self._silent = True
        raise self._unavailable(wait_s)

    def _send(self, body: Message, wait_s: float) -> int:
        self._request += 1
        try:
            self._socket.send(encode(self._epoch, self._request, body), zmq.NOBLOCK)
        except zmq.Again as error:  # as many as a socket keeps are waiting for a dead pool
            raise self._unavailable(wait_s) from error
        return self._request

    def _take_late(self, envelope: Envelope) -> None:
        """Nobody waits for this answer any more; what it grants is to be given back."""
        reply = envelope.body
        if envelope.epoch != self._epoch:
            return
        if isinstance(reply, PinReply):
            granted = [status is Lookup.HIT for status in reply.statuses]
        elif isinstance(reply, ReserveReply):
            granted = [status is Reserved.GRANTED for status in reply.statuses]
        else:
            return
        refs = references(reply.slots, reply.generations)
        held = [ref for ref, ours in zip(refs, granted, strict=True) if ours]
        (self._owed_pins if isinstance(reply, PinReply) else self._owed_slots).extend(held)

    def _unavailable(self, wait_s: float) -> Unavailable:
        return Unavailable(
            f"the pool at {self.endpoint}", wait_s, "Recompute; it is restarting or overloaded."
        )


def columns(refs: Sequence[SlotRef]) -> tuple[list[int], list[int]]:
    """Return slots and generations, as messages carry them."""
    return [ref.slot for ref in refs], [ref.generation for ref in refs]


def references(slots: Sequence[int], generations: Sequence[int]) -> list[SlotRef]:
    """Return what two columns name."""
    return list(map(SlotRef, slots, generations))
