"""What the connector finds out of vLLM's block pool and tells the pool, without vLLM."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.actors.engines.vllm.geometry import CacheGeometry, RankGroup
from kvfabric.actors.engines.vllm.gpu_chunks import GpuChange, GpuChunks, GpuGroup
from kvfabric.actors.engines.vllm.gpu_teller import GpuNews, Turn
from kvfabric.actors.engines.vllm.gpu_watch import GpuSide, problem_of
from kvfabric.fabric.errors import Closed, Conservation, Unavailable
from kvfabric.fabric.layout import GroupLayout
from kvfabric.fabric.types import make_key

BLOCK_TOKENS = 16


def digest(*path: int) -> bytes:
    """Return the hash of the block at the end of a path: it names the whole prefix."""
    return bytes(path).rjust(32, b"\0")


def hashes(*numbers: int) -> list[bytes]:
    return [digest(*numbers[: end + 1]) for end in range(len(numbers))]


class Table:
    """As vLLM's map from hash to block: one key may have several blocks."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, set[int]] = {}

    def insert(self, key, block):
        self.blocks.setdefault(key, set()).add(block)

    def pop(self, key, block_id):
        if block_id not in self.blocks.get(key, ()):
            return None
        self.blocks[key].discard(block_id)
        if not self.blocks[key]:
            del self.blocks[key]
        return block_id

    def get_one_block(self, key):
        return next(iter(self.blocks[key])) if key in self.blocks else None


class BlockPool:
    """As vLLM's block pool, as far as hashes come and go."""

    def __init__(self, hash_tokens: int = BLOCK_TOKENS) -> None:
        self.cached_block_hash_to_block = Table()
        self.hash_tokens = hash_tokens
        self.used = False

    def cache_full_blocks(
        self,
        request,
        blocks,
        num_cached_blocks,
        num_full_blocks,
        block_size,
        kv_cache_group_id,
        block_mask=None,
    ):
        each = block_size // self.hash_tokens
        for at in range(num_cached_blocks, num_full_blocks):
            if block_mask is None or block_mask[at - num_cached_blocks]:
                key = make_key(request.block_hashes[(at + 1) * each - 1], kv_cache_group_id)
                self.cached_block_hash_to_block.insert(key, blocks[at])

    def evict(self, block, group=0):
        for key, blocks in list(self.cached_block_hash_to_block.blocks.items()):
            if block in blocks and key.endswith(group.to_bytes(4, "big")):
                self.cached_block_hash_to_block.pop(key, block)

    def reset_prefix_cache(self):
        if self.used:
            return False
        self.cached_block_hash_to_block = Table()
        return True


class Listener:
    """A pool client that remembers what it was told, as a pool would."""

    def __init__(self) -> None:
        self.attachments = 1
        self.on_attach = lambda: None
        self.held: set[bytes] = set()
        self.messages = 0
        self.fault: Exception | None = None
        self.lost_answer = False

    def tell_gpu(self, stored, removed, *, whole):
        self.messages += 1
        if self.fault is not None:
            raise self.fault
        assert len(stored) + len(removed) <= 65_536
        if whole:
            self.held.clear()
        self.held -= set(removed)
        self.held |= set(stored)
        if self.lost_answer:
            raise Unavailable("the pool", 0.4, "")

    def restart(self):
        self.held.clear()
        self.attachments += 1
        self.on_attach()


def keys(paths, group=0):
    return {make_key(digest(*path), group) for path in paths}


def layout(chunk_tokens: int) -> GroupLayout:
    return GroupLayout.opaque(1, 64, BLOCK_TOKENS, chunk_tokens, "t")


class Engine:
    """A block pool that is watched, and what its pool was told."""

    def __init__(self, chunk_blocks: int = 1, ranks: int = 1, groups: int = 1, **pool) -> None:
        chunk = layout(chunk_blocks * BLOCK_TOKENS)
        geometry = CacheGeometry(
            0,
            ranks,
            tuple(RankGroup(group, chunk, BLOCK_TOKENS) for group in range(groups)),
            "bf16",
            "none",
        )
        self.blocks = BlockPool(**pool)
        self.listener: Listener | None = Listener()
        self.side = GpuSide(self.blocks, geometry, self.blocks.hash_tokens, lambda: self.listener)
        self.next_block = 0

    def cache(self, *path: int, first: int = 0, group: int = 0, mask=None) -> list[int]:
        """Give the blocks of a prompt from `first` on their hashes; return them all."""
        blocks = list(range(self.next_block, self.next_block + len(path)))
        self.next_block += len(path)
        self.blocks.cache_full_blocks(
            request=SimpleNamespace(block_hashes=hashes(*path)),
            blocks=blocks,
            num_cached_blocks=first,
            num_full_blocks=len(path),
            block_size=BLOCK_TOKENS,
            kv_cache_group_id=group,
            block_mask=mask,
        )
        return blocks

    def told(self) -> set[bytes]:
        """End a step, tell, and return what the pool knows then."""
        assert self.listener is not None
        self.side.step_over()
        while self.side.teller.turn() is Turn.TOLD:
            pass
        self.side._chunks.check()
        return self.listener.held


def test_blocks_that_come_and_go_are_told():
    engine = Engine()
    first = engine.cache(1, 2, 3)
    assert engine.told() == keys([(1,), (1, 2), (1, 2, 3)])
    engine.blocks.evict(first[2])
    engine.cache(1, 2, 4, first=2)
    assert engine.told() == keys([(1,), (1, 2), (1, 2, 4)])


def test_a_hash_with_two_blocks_stays_until_both_left():
    engine = Engine()
    (one,), (two,) = engine.cache(1), engine.cache(1)
    assert engine.told() == keys([(1,)])
    engine.blocks.evict(one)
    assert engine.told() == keys([(1,)])
    engine.blocks.evict(two)
    assert engine.told() == set()


def test_what_came_and_went_within_a_step_is_no_news():
    engine = Engine()
    engine.told()
    messages = engine.listener.messages
    for block in engine.cache(1, 2):
        engine.blocks.evict(block)
    assert engine.told() == set()
    assert engine.listener.messages == messages


def test_a_chunk_of_several_blocks_is_there_while_all_are():
    engine = Engine(chunk_blocks=2)
    blocks = engine.cache(1, 2, 3)
    assert engine.told() == keys([(1, 2)])
    engine.cache(1, 2, 3, 4, first=3)
    assert engine.told() == keys([(1, 2), (1, 2, 3, 4)])
    engine.blocks.evict(blocks[0])
    assert engine.told() == keys([(1, 2, 3, 4)])
    engine.cache(1)
    assert engine.told() == keys([(1, 2), (1, 2, 3, 4)])
    engine.blocks.evict(blocks[1])
    assert engine.told() == keys([(1, 2, 3, 4)])
    engine.cache(1, 2, first=1)
    assert engine.told() == keys([(1, 2), (1, 2, 3, 4)])


def test_prompts_that_part_within_a_chunk():
    engine = Engine(chunk_blocks=2)
    blocks = engine.cache(1, 2)
    engine.cache(1, 3, first=1)
    assert engine.told() == keys([(1, 2), (1, 3)])
    engine.blocks.evict(blocks[0])
    assert engine.told() == set()
    engine.cache(1)
    assert engine.told() == keys([(1, 2), (1, 3)])


def test_blocks_that_a_window_masks_make_no_chunk():
    engine = Engine(chunk_blocks=2)
    engine.cache(1, 2, 3, 4, mask=[False, True, True, True])
    assert engine.told() == keys([(1, 2, 3, 4)])
    engine.cache(1, 2, 3, 4, mask=[True, False, True, False])
    assert engine.told() == keys([(1, 2), (1, 2, 3, 4)])


def test_blocks_longer_than_a_hash():
    engine = Engine(chunk_blocks=2, hash_tokens=BLOCK_TOKENS // 2)
    path = range(1, 9)
    engine.blocks.cache_full_blocks(
        SimpleNamespace(block_hashes=hashes(*path)), list(range(4)), 0, 4, BLOCK_TOKENS, 0
    )
    assert engine.told() == keys([(1, 2, 3, 4), tuple(path)])


def test_groups_and_ranks_have_keys_of_their_own():
    engine = Engine(ranks=2, groups=2)
    engine.cache(1)
    engine.cache(1, group=1)
    engine.cache(1, group=7)
    assert engine.told() == {make_key(digest(1), index) for index in range(4)}


def test_a_reset_takes_everything_back_at_once_and_goes_on():
    engine = Engine(chunk_blocks=2)
    engine.cache(1, 2)
    engine.blocks.used = True
    assert not engine.blocks.reset_prefix_cache()
    assert engine.told() == keys([(1, 2)])
    engine.blocks.used = False
    assert engine.blocks.reset_prefix_cache()
    assert engine.side.teller.turn() is Turn.TOLD
    assert engine.listener.held == set()
    engine.cache(1, 2, 3, 4)
    assert engine.told() == keys([(1, 2), (1, 2, 3, 4)])


def test_closed_it_leaves_the_pool_as_it_was():
    engine = Engine(chunk_blocks=2)
    engine.side.close()
    assert set(vars(engine.blocks)) == {"cached_block_hash_to_block", "hash_tokens", "used"}
    assert set(vars(engine.blocks.cached_block_hash_to_block)) == {"blocks"}


@pytest.mark.parametrize("lacks", ["map", "pop", "parameters"])
def test_a_block_pool_of_another_kind_is_not_watched(lacks: str):
    pool = BlockPool()
    assert problem_of(pool) == ""
    if lacks == "map":
        del pool.cached_block_hash_to_block
    elif lacks == "pop":
        pool.cached_block_hash_to_block = SimpleNamespace(insert=len, get_one_block=len)
    else:
        pool.cache_full_blocks = lambda request, block_ids: None
    assert problem_of(pool)


def test_a_pool_that_restarts_is_told_everything():
    engine = Engine()
    engine.cache(1, 2)
    engine.told()
    engine.listener.restart()
    assert engine.told() == keys([(1,), (1, 2)])
    other = engine.listener = Listener()
    assert engine.told() == keys([(1,), (1, 2)]) == other.held


@pytest.mark.parametrize("fault", [Unavailable("the pool", 0.4, ""), Closed("the pool client")])
def test_a_pool_that_is_away_hears_the_whole_later(fault):
    engine = Engine()
    blocks = engine.cache(1, 2)
    engine.told()
    engine.listener.fault = fault
    engine.blocks.evict(blocks[1])
    engine.side.step_over()
    for _ in range(3):
        assert engine.side.teller.turn() is Turn.AWAY
    engine.cache(5)
    engine.listener.fault = None
    assert engine.told() == keys([(1,), (5,)])
    engine.listener, kept = None, engine.listener
    assert engine.side.teller.turn() is Turn.AWAY
    engine.listener = kept
    assert engine.side.teller.turn() is Turn.IDLE


def test_where_an_answer_was_lost_all_is_told_again():
    engine = Engine()
    engine.cache(1)
    engine.told()
    engine.listener.lost_answer = True
    engine.cache(2)
    engine.side.step_over()
    assert engine.side.teller.turn() is Turn.AWAY
    engine.listener.lost_answer = False
    engine.listener.held = {b"rubbish"}
    assert engine.told() == keys([(1,), (2,)])


def test_too_much_news_is_replaced_by_the_whole():
    news = GpuNews(waiting_max=3)
    assert [report.whole for report in news.take()] == [True]
    assert news.take() == []
    first, more = [make_key(digest(n), 0) for n in range(3)], make_key(digest(9), 0)
    news.change(GpuChange(first, ()))
    (report,) = news.take()
    assert (report.whole, list(report.stored)) == (False, first)
    news.change(GpuChange((), first[:1]))
    news.change(GpuChange([more], first[1:]))
    (report,) = news.take()
    assert (report.whole, list(report.stored), report.removed) == (True, [more], ())


def test_the_whole_travels_in_parts():
    news = GpuNews()
    many = [make_key(n.to_bytes(32, "big"), 0) for n in range(70_000)]
    news.change(GpuChange(many, ()))
    parts = news.take()
    assert [part.whole for part in parts] == [True, False]
    assert [key for part in parts for key in part.stored] == many


def test_a_teller_in_its_thread_tells_and_ends():
    engine = Engine()
    engine.cache(1)
    engine.side.step_over()
    engine.side.start()
    engine.side.close()
    assert engine.side.teller._thread is None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cache"), st.lists(st.integers(1, 2), min_size=1, max_size=5)),
        st.tuples(st.just("evict"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 3))
def test_what_is_told_equals_what_is_there(steps, chunk_blocks: int):
    engine = Engine(chunk_blocks)
    paths: set[tuple[int, ...]] = set()
    for what, value in steps:
        if what == "cache":
            first = len(value) - 1 if tuple(value[:-1]) in paths else 0
            paths |= {tuple(value[:end]) for end in range(1, len(value) + 1)}
            engine.cache(*value, first=first)
        elif what == "evict":
            engine.blocks.evict(value)
        elif what == "reset":
            engine.blocks.reset_prefix_cache()
        elif what == "restart":
            engine.listener.restart()
        else:
            engine.told()
    there = engine.blocks.cached_block_hash_to_block.blocks
    assert engine.told() == {
        make_key(digest(*path), 0)
        for path in paths
        if len(path) % chunk_blocks == 0
        and all(
            make_key(digest(*path[:end]), 0) in there
            for end in range(len(path) - chunk_blocks + 1, len(path) + 1)
        )
    }


def test_books_that_do_not_balance_are_found():
    chunks = GpuChunks({0: GpuGroup(2, (0,), same=True)})
    chunks.learn(0, 0, hashes(1, 2), lambda _key: True)
    chunks.check()
    chunks._ends.clear()
    with pytest.raises(Conservation):
        chunks.check()
