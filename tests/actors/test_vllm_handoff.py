"""What routers may say of where a request's KV is: understood, or no source, and never an error."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.actors.engines.vllm.handoff import Handoff, prefiller_params, read_handoff
from kvfabric.actors.engines.vllm.settings import HANDOFF_S, SOURCES_MAX
from kvfabric.fabric.types import ANY_NODE, SourceRange


def at(host: object, port: object = 5) -> dict[str, object]:
    return {"remote_host": host, "remote_port": port}


def sources(params: object) -> list[str]:
    return [source.endpoint for source in read_handoff(params).sources]


@pytest.mark.parametrize("params", [None, {}])
def test_no_params_mean_nothing(params) -> None:
    assert read_handoff(params) == Handoff()


def test_a_prefiller_is_asked_again_for_what_it_may_not_have_yet() -> None:
    handoff = read_handoff({"remote_prefiller": at("10.0.0.1", 7)})
    assert handoff == Handoff((SourceRange(ANY_NODE, "tcp://10.0.0.1:7", 0, 0),), HANDOFF_S)


def test_another_source_is_asked_once() -> None:
    handoff = read_handoff({"remote_kv_source": at("node-3.cluster", "65535")})
    assert [source.endpoint for source in handoff.sources] == ["tcp://node-3.cluster:65535"]
    assert handoff.again_s == 0


def test_a_decoder_wants_an_answer_and_is_no_source() -> None:
    assert read_handoff({"remote_decoder": at("h")}) == Handoff(wants_prefiller=True)


def test_all_ways_together_each_endpoint_once_and_no_more_than_allowed() -> None:
    many = [f"tcp://h{number}:1" for number in range(2 * SOURCES_MAX)]
    params = {
        "remote_prefiller": at("p"),
        "remote_kv_source": at("p"),
        "kvfabric": {"sources": ["tcp://p:5", "tcp://h0:1", *many]},
    }
    assert sources(params) == ["tcp://p:5", *many[: SOURCES_MAX - 1]]


@pytest.mark.parametrize(
    ("host", "endpoint"), [("fe80::1", "tcp://[fe80::1]:5"), ("[::1]", "tcp://[::1]:5")]
)
def test_addresses_with_colons_are_put_in_brackets(host, endpoint) -> None:
    assert sources({"remote_kv_source": at(host)}) == [endpoint]
    back = prefiller_params(endpoint)
    assert back is not None
    assert sources(back) == [endpoint]


OF_VLLM = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "r",
    "tp_size": 2,
    "transfer_id": "t",
}


def test_params_of_other_connectors_are_left_alone() -> None:
    assert read_handoff(OF_VLLM) == Handoff()
    assert sources({**OF_VLLM, "remote_kv_source": at("h")}) == ["tcp://h:5"]


RUBBISH_PORTS = [None, "", "x", 0, -1, 65536, 70000, "²", "٣", "1 ", 1.0, True, [], {}, 10**5000]
RUBBISH_HOSTS = [
    None,
    "",
    7,
    b"h",
    "no such host",
    "a/b",
    "h:1:",
    "\ud800",
    "*",
    "a\nb",
    "x" * 300,
    [],
]


@pytest.mark.parametrize("key", ["remote_prefiller", "remote_kv_source"])
def test_no_rubbish_in_host_or_port_is_a_source(key) -> None:
    for port in RUBBISH_PORTS:
        assert sources({key: at("h", port)}) == [], port
    for host in RUBBISH_HOSTS:
        assert sources({key: at(host)}) == [], host
    for value in ("10.0.0.1", 7, [at("h")], {}, {"remote_host": "h"}, {"remote_port": 5}):
        assert sources({key: value}) == [], value


def test_one_bad_source_does_not_take_the_good_ones_along() -> None:
    bad = ["tcp://", "file:///etc", "", "tcp://h:99999", "tcp://h:0", 7, None, "ipc:///x", "\ud800"]
    assert sources({"kvfabric": {"sources": [*bad, "tcp://h:1"]}}) == ["tcp://h:1"]
    for own in (1, [1], "tcp://h:1", {}, {"sources": "tcp://h:1"}, {"sources": {"a": 1}}):
        assert sources({"kvfabric": own}) == []


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=4)
    | st.sampled_from(["h", "::1", "tcp://h:1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["remote_host", "remote_port", "sources"]) | st.integers(), inner
        )
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["remote_prefiller", "remote_kv_source", "remote_decoder", "kvfabric"])


@settings(max_examples=80)
@given(st.dictionaries(KEYS | st.text(max_size=3) | st.integers(), VALUES, max_size=4) | VALUES)
def test_whatever_a_router_sends_is_read(params) -> None:
    handoff = read_handoff(params)
    assert len(handoff.sources) <= SOURCES_MAX
    assert handoff.again_s in (0.0, HANDOFF_S)
    for source in handoff.sources:
        assert source.endpoint.isascii()
        assert source.endpoint.startswith("tcp://")
        assert 0 < int(source.endpoint.rpartition(":")[2]) <= 65535
    assert pickle.loads(pickle.dumps(handoff)) == handoff


def test_the_answer_to_a_prefill_names_the_pool() -> None:
    assert prefiller_params("tcp://10.0.0.1:7") == {"remote_prefiller": at("10.0.0.1", 7)}


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://h", "tcp://h:", "h:x", "ipc:///x", "h:²"]
)
def test_a_pool_that_serves_no_peers_is_not_named(endpoint) -> None:
    assert prefiller_params(endpoint) is None
