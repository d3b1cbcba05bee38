"""What a step costs the scheduler's half: a request that did not grow is not looked at again."""

from types import SimpleNamespace

from kvfabric.actors.engines.vllm.geometry import CacheGeometry, RankGroup
from kvfabric.actors.engines.vllm.scheduler import SchedulerSide
from kvfabric.actors.engines.vllm.settings import ConnectorSettings
from kvfabric.fabric.layout import GroupLayout

BLOCK_TOKENS = 4


def test_a_decode_step_without_a_new_block_reads_no_block_table(clock) -> None:
    full = GroupLayout.opaque(1, 64, BLOCK_TOKENS, BLOCK_TOKENS, "tag")
    window = GroupLayout.opaque(1, 64, BLOCK_TOKENS, BLOCK_TOKENS, "tag", window_tokens=8)
    groups = tuple(RankGroup(at, each, BLOCK_TOKENS) for at, each in enumerate((full, window)))
    side = SchedulerSide(
        ConnectorSettings(pool="ipc://none"),
        CacheGeometry(0, 1, groups, "float32", "none"),
        BLOCK_TOKENS,
        lambda _reset: None,
        clock,
    )
    request = SimpleNamespace(
        request_id="a",
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_tokens=41,
        block_hashes=[bytes([at]) * 32 for at in range(10)],
        kv_transfer_params=None,
    )
    read: list[str] = []

    def tables(request_id):
        read.append(request_id)
        return [range(1, 12), range(21, 32)]

    assert side.matched(request, 0) == 0
    side.plan(["a"], ["a"], [*range(1, 12), *range(21, 32)], tables, {"a"})
    assert read == ["a"]
    for _ in range(3):
        side.plan(["a"], [], [], tables, set())
    assert read == ["a"]
    side.plan(["a"], [], [12, 32], tables, {"a"})
    assert read == ["a", "a"]
    side.plan(["a"], [], [], tables)
    assert read == ["a"] * 3  # who grew was not said
