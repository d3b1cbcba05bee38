"""The bytes of every message between peers."""

import pytest

from kvfabric.fabric.types import Lookup, Released
from kvfabric.fabric.wire import (
    Bye,
    Grant,
    Hello,
    Lease,
    Ok,
    Refused,
    Release,
    ReleaseReply,
    Stale,
    Welcome,
    decode,
    encode,
)

GOLDEN = [
    (Hello("b", b"\x01\x02"), "9401090393a568656c6c6fa162c4020102"),
    (
        Welcome("a", b"\x03", [1 << 32], [1 << 20], 4096),
        ("9401090396a777656c636f6d65a161c4010391cf000000010000000091ce00100000cd1000"),
    ),
    (
        Lease(b"n" * 16, [b"k" * 20], 5.0),
        (
            "9401090394a56c65617365c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e91c4146b6b6b6b6b6b6b6b"
            "6b6b6b6b6b6b6b6b6b6b6b6bcb4014000000000000"
        ),
    ),
    (
        Grant(
            [Lookup.HIT, Lookup.MISS], [0, 0], [4096, 0], [4000, 0], [1, 0], [7, 0], [255, 0], 5.0
        ),
        (
            "9401090399a56772616e7492010092000092cd10000092cd0fa00092010092070092ccff00cb4014"
            "000000000000"
        ),
    ),
    (Release([1], [7]), "9401090393a772656c6561736591019107"),
    (ReleaseReply([Released.HELD, Released.LOST]), "9401090392a872656c6561736564920001"),
    (Stale(), "9401090391a57374616c65"),
    (
        Refused("peers_max", "256", "one more"),
        ("9401090394a772656675736564a970656572735f6d6178a3323536a86f6e65206d6f7265"),
    ),
    (Bye(), "9401090391a3627965"),
    (Ok(), "9401090391a26f6b"),
]


@pytest.mark.parametrize(("body", "frame"), GOLDEN, ids=lambda value: type(value).__name__)
def test_bytes(body, frame):
    assert encode(9, 3, body).hex() == frame
    envelope = decode(bytes.fromhex(frame))
    assert (envelope.epoch, envelope.request, envelope.body) == (9, 3, body)
