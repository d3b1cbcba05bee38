"""The fence against a naive model: who still reads a block is told before it is overwritten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfabric.actors.engines.vllm.fence import Fence

BLOCKS = st.lists(st.integers(1, 12), max_size=5)


class FenceMachine(RuleBasedStateMachine):
    """Jobs begin, ranks end them in any order, blocks are overwritten."""

    @initialize(ranks=st.integers(1, 3))
    def begin(self, ranks: int) -> None:
        self.ranks = ranks
        self.fence = Fence(ranks)
        self.reading: dict[int, set[int]] = {}
        self.done: dict[int, int] = {}
        self.next_job = 0

    @rule(blocks=BLOCKS)
    def issue(self, blocks: list[int]) -> None:
        self.fence.issue(self.next_job, iter(blocks))
        self.reading[self.next_job] = set(blocks)
        self.done[self.next_job] = 0
        self.next_job += 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def one_rank_is_done(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.reading)))
        self.fence.over(job)
        self.done[job] += 1
        if self.done[job] == self.ranks:
            del self.reading[job]

    @rule(job=st.integers(0, 5))
    def an_old_job_is_done_again(self, job: int) -> None:
        if job not in self.reading:
            self.fence.over(job)

    @rule(written=BLOCKS)
    def overwrite(self, written: list[int]) -> None:
        expected = {job for job, blocks in self.reading.items() if blocks & set(written)}
        flush = self.fence.readers(iter(written))
        assert set(flush) == expected
        assert len(flush) == len(expected)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "fence"):
            assert len(self.fence) == len(self.reading)
            if not self.reading:
                assert not self.fence._readers


FenceMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
TestFence = FenceMachine.TestCase


def test_the_older_of_two_readers_is_told_when_the_newer_is_over() -> None:
    fence = Fence(1)
    fence.issue(0, [7])
    fence.issue(1, [7])
    fence.over(1)
    assert fence.readers([7]) == (0,)
    fence.over(0)
    assert fence.readers([7]) == ()
