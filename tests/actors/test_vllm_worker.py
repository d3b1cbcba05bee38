"""The worker's half on a pool of dicts: what is saved comes back, what fails is said."""

import threading
from collections.abc import Sequence

import pytest
import torch
from vllm_yard import BLOCK_BYTES, SOON_S, DictPool, Gate, geometry, group, hashes, soon

from kvfabric.actors.engines.vllm import worker as worker_module
from kvfabric.actors.engines.vllm.copier import BlockCopier, OpaqueViews
from kvfabric.actors.engines.vllm.settings import PAUSE_S
from kvfabric.actors.engines.vllm.transfers import ChunkRun, LoadJob, SaveJob, StepPlan
from kvfabric.actors.engines.vllm.worker import Finished, WorkerSide
from kvfabric.fabric.errors import NamespaceMismatch
from kvfabric.fabric.types import make_key

BLOCKS = 24
GROUPS = [group(0, 8), group(1, 8, window=16)]
"""Two blocks of four tokens a chunk."""
PROMPT = hashes("prompt", 10)


class Bench:
    """A worker with a cache of known bytes, on a pool of dicts."""

    def __init__(self, pool: DictPool, clock, rank: int = 0, size: int = 1) -> None:
        self.pool = pool
        self.cache = geometry(*GROUPS, rank=rank, size=size)
        generator = torch.Generator().manual_seed(rank)
        self.rows = [
            torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=generator)
            for _ in GROUPS
        ]
        self.copier = BlockCopier([OpaqueViews((row,)) for row in self.rows])
        self.side = WorkerSide(self.cache, self.copier, pool.attach, clock)
        self.saved: list[int] = []
        self.failed: list[str] = []
        self.silent = False
        self.finished = Finished()

    def look(self) -> None:
        """Take in what the worker has to say, as an engine does after each step."""
        finished, report = self.side.finished(), self.side.report()
        self.finished.requests |= finished.requests
        self.finished.failed |= finished.failed
        self.finished.bad_blocks |= finished.bad_blocks
        if report is not None:
            assert not report.empty
            self.saved += report.saved
            self.failed += report.failed_loads
            self.silent |= report.silent

    def save(self, *jobs: SaveJob, reset: int = 0, flush: tuple[int, ...] = ()) -> None:
        self.side.take(StepPlan(reset, flush, jobs))

    def until_saved(self, *jobs: int) -> None:
        soon(lambda: self.look() or set(jobs) <= set(self.saved))

    def load(self, job: LoadJob, reset: int = 0) -> None:
        """Load between steps, and wait until it is over."""
        self.side.start_loads(StepPlan(reset, loads=(job,)))
        soon(lambda: self.look() or job.request_id in self.finished.requests)

    def block(self, group: int, block: int) -> bytes:
        return bytes(self.rows[group][block].numpy())

    def key(self, group: int, chunk: int) -> bytes:
        return make_key(PROMPT[chunk], self.cache.index(group))

    def stored(self, reset: int = 0) -> set[bytes]:
        return {key for number, key in self.pool.chunks if number == reset}


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


@pytest.fixture
def bench(pool, clock):
    made = Bench(pool, clock)
    yield made
    pool.on_ask = lambda: None
    made.side.close()
    assert pool.open_clients == 0
    assert not any(thread.is_alive() for thread in made.side._threads)


def run(group: int, blocks: Sequence[int], first: int = 0) -> ChunkRun:
    return ChunkRun(group, first, PROMPT[first : first + len(blocks) // 2], list(blocks))


def save(number: int, *runs: ChunkRun) -> SaveJob:
    return SaveJob(number, runs)


def load(*runs: ChunkRun, request: str = "r") -> LoadJob:
    return LoadJob(request, runs)


def test_what_is_saved_comes_back_into_other_blocks(bench) -> None:
    bench.save(save(0, run(0, [1, 2, 3, 4]), run(1, [5, 6])))
    bench.until_saved(0)
    assert bench.stored() == {bench.key(0, 0), bench.key(0, 1), bench.key(1, 0)}
    bench.load(load(run(0, [11, 12, 13, 14]), run(1, [15, 16])))
    for group_index, pairs in ((0, [(1, 11), (2, 12), (3, 13), (4, 14)]), (1, [(5, 15), (6, 16)])):
        for old, new in pairs:
            assert bench.block(group_index, new) == bench.block(group_index, old)
    assert bench.finished == Finished({"r"})
    assert (bench.failed, bench.silent) == ([], False)
    assert bench.side.report() is None
    assert bench.side.finished() == Finished()


def test_a_load_writes_the_blocks_of_its_job_and_no_others(bench) -> None:
    bench.save(save(0, run(0, [1, 2, 3, 4])))
    bench.until_saved(0)
    before = [row.clone() for row in bench.rows]
    bench.load(load(run(0, [0, 12, 13, 14])))
    for row, was in zip(bench.rows, before, strict=True):
        changed = (row != was).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= ({0, 12, 13, 14} if row is bench.rows[0] else set())


def test_a_chunk_that_is_not_there_is_reported_with_its_blocks(bench) -> None:
    bench.save(save(0, run(0, [1, 2, 3, 4, 5, 6])))
    bench.until_saved(0)
    del bench.pool.chunks[0, bench.key(0, 1)]
    bench.load(load(run(0, [11, 12, 0, 14, 15, 16])))
    assert bench.finished == Finished({"r"}, {"r"}, {14})
    assert bench.failed == ["r"]
    assert bench.block(0, 16) == bench.block(0, 6)


def test_a_chunk_that_changed_is_reported_and_not_copied(bench) -> None:
    bench.save(save(0, run(0, [1, 2, 3, 4])))
    bench.until_saved(0)
    bench.pool.corrupt = {bench.key(0, 0)}
    before = bench.block(0, 11), bench.block(0, 12)
    bench.load(load(run(0, [11, 12, 13, 14])))
    assert bench.finished == Finished({"r"}, {"r"}, {11, 12})
    assert (bench.block(0, 11), bench.block(0, 12)) == before


def test_a_load_before_the_step_is_over_when_it_returns(bench) -> None:
    bench.save(save(0, run(0, [1, 2])))
    bench.until_saved(0)
    plan = StepPlan(0, loads=(load(run(0, [11, 12])), load(run(0, [13, 14], 1), request="s")))
    bench.side.load_now(plan)
    bench.look()
    assert bench.block(0, 11) == bench.block(0, 1)
    assert bench.finished == Finished({"r", "s"}, {"s"}, {13, 14})


def test_a_silent_pool_fails_loads_and_is_left_alone_for_a_while(bench, clock) -> None:
    bench.load(load(run(0, [1, 2]), request="first"))
    bench.pool.silence()
    asked: list[int] = []
    bench.pool.on_ask = lambda: asked.append(1)
    for name in ("a", "b"):
        bench.load(load(run(0, [11, 12], 1), request=name))
        assert name in bench.finished.failed
    assert len(asked) == 1
    assert bench.silent
    bench.pool.silence(silent=False)
    bench.pool.put(())
    clock.advance_s(PAUSE_S + 0.1)
    bench.load(load(run(0, [11, 12], 1), request="c"))
    assert len(asked) == 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_pool_that_refuses_fails_the_load_and_ends_nothing(bench, mode) -> None:
    bench.pool.refusal = NamespaceMismatch("layout", "a", "b")
    job = load(run(0, [11, 12]))
    if mode == "sync":
        bench.side.load_now(StepPlan(0, loads=(job,)))
        bench.look()
    else:
        bench.load(job)
    assert bench.finished == Finished({"r"}, {"r"}, {11, 12})
    bench.save(save(0, run(0, [1, 2])))
    bench.until_saved(0)
    assert not bench.stored()


def test_a_copy_that_fails_ends_no_thread(bench, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such block")

    with monkeypatch.context() as broken:
        broken.setattr(BlockCopier, "pack", fail)
        bench.save(save(0, run(0, [1, 2])))
        bench.until_saved(0)
    assert not bench.stored()
    bench.save(save(1, run(0, [1, 2])))
    bench.until_saved(1)
    with monkeypatch.context() as broken:
        broken.setattr(BlockCopier, "unpack", fail)
        bench.load(load(run(0, [11, 12])))
    assert bench.finished == Finished({"r"}, {"r"}, {11, 12})
    bench.load(load(run(0, [11, 12]), request="s"))
    assert bench.finished == Finished({"r", "s"}, {"r"}, {11, 12})


def test_a_load_of_nothing_is_over_and_did_not_fail(bench) -> None:
    bench.load(load())
    assert bench.finished == Finished({"r"})


def test_a_silent_pool_ends_saves_and_is_said_to_be_silent(bench) -> None:
    bench.pool.silence()
    bench.pool.on_ask = lambda: bench.pool.silence(silent=bool(bench.pool.clients))
    bench.save(save(0, run(0, [1, 2])), save(1, run(0, [3, 4], 1)))
    bench.until_saved(0, 1)
    assert (bench.stored(), bench.silent) == (set(), True)


def test_a_pool_without_room_is_no_fault(bench) -> None:
    bench.pool.slots_max = 1
    bench.save(save(0, run(0, [1, 2, 3, 4])))
    bench.until_saved(0)
    assert (bench.stored(), bench.silent) == (set(), False)


def held_copies(bench: Bench, monkeypatch) -> Gate:
    """Let the first copy out of the engine wait at a gate."""
    gate, pack = Gate(), bench.copier.pack

    def wait(*arguments) -> None:
        gate.pass_through()
        pack(*arguments)

    monkeypatch.setattr(bench.copier, "pack", wait)
    return gate


def test_a_save_that_takes_too_long_is_thrown_away(bench, monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "FLUSH_WAIT_S", 0.001)
    gate = held_copies(bench, monkeypatch)
    bench.save(save(0, run(0, [1, 2, 3, 4])), save(1, run(1, [5, 6])), save(2, run(0, [7, 8], 3)))
    gate.wait_reached()
    bench.save(flush=(0, 1))
    bench.rows[0].fill_(7)  # the engine overwrites its blocks
    gate.open()
    bench.until_saved(0, 1, 2)
    assert bench.stored() == {bench.key(0, 3)}
    assert not bench.side._savings


def test_a_step_waits_for_a_save_that_is_under_way(bench, monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "FLUSH_WAIT_S", SOON_S)
    gate = held_copies(bench, monkeypatch)
    bench.save(save(0, run(0, [1, 2])))
    gate.wait_reached()
    step = threading.Thread(target=lambda: bench.save(flush=(0, 17)))
    step.start()
    assert step.is_alive()
    gate.open()
    step.join(SOON_S)
    assert bench.stored() == {bench.key(0, 0)}
    assert bench.pool.chunks[0, bench.key(0, 0)] == bench.block(0, 1) + bench.block(0, 2)


def test_a_save_that_is_over_is_not_waited_for(bench, monkeypatch) -> None:
    bench.save(save(0, run(0, [1, 2])))
    soon(lambda: bench.side._savings[0].over.is_set())
    bench.save(flush=(0,))
    assert not bench.side._savings[0].cancelled.is_set()
    bench.until_saved(0)
    bench.save(flush=(0,))
    assert bench.stored() == {bench.key(0, 0)}


def test_slices_that_were_published_stay(bench, monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "SAVE_SLICE_CHUNKS", 2)
    monkeypatch.setattr(worker_module, "FLUSH_WAIT_S", 0.001)
    gate, pack, packed = Gate(), bench.copier.pack, []

    def wait(*arguments) -> None:
        packed.append(arguments)
        if len(packed) == 4:
            gate.pass_through()
        pack(*arguments)

    monkeypatch.setattr(bench.copier, "pack", wait)
    bench.save(save(0, run(0, list(range(1, 11)))))
    gate.wait_reached()
    bench.save(flush=(0,))
    gate.open()
    bench.until_saved(0)
    assert bench.stored() == {bench.key(0, 0), bench.key(0, 1)}


def test_what_the_pool_has_is_not_copied_again(bench, monkeypatch) -> None:
    bench.save(save(0, run(0, [1, 2])))
    bench.until_saved(0)
    monkeypatch.setattr(bench.copier, "pack", None)
    bench.save(save(1, run(0, [3, 4])))
    bench.until_saved(1)
    assert bench.pool.chunks[0, bench.key(0, 0)] == bench.block(0, 1) + bench.block(0, 2)


def test_after_a_reset_everything_goes_under_the_new_namespace(bench) -> None:
    bench.save(save(0, run(0, [1, 2])))
    bench.until_saved(0)
    bench.save(save(1, run(0, [3, 4], 1)), reset=1)
    bench.until_saved(1)
    bench.load(load(run(0, [11, 12])), reset=1)
    assert bench.finished.failed == {"r"}
    assert bench.stored() == {bench.key(0, 0)}
    assert bench.stored(1) == {bench.key(0, 1)}
    assert [client.closed for client in bench.pool.clients if not client.reset] == [True]


def test_jobs_of_before_a_reset_do_nothing(bench) -> None:
    bench.save(save(0, run(0, [1, 2])), reset=1)
    bench.load(load(run(0, [11, 12], 5)), reset=1)
    bench.save(save(1, run(0, [3, 4], 1)), reset=0)
    bench.load(load(run(0, [13, 14]), request="old"), reset=0)
    bench.until_saved(0, 1)
    assert bench.stored() == set()
    assert bench.finished.failed == {"r", "old"}


def test_ranks_keep_their_bytes_apart(pool, clock) -> None:
    benches = [Bench(pool, clock, rank, 2) for rank in range(2)]
    for bench in benches:
        bench.save(save(0, run(0, [1, 2])))
        bench.until_saved(0)
    assert len(pool.chunks) == 2
    for bench in benches:
        bench.load(load(run(0, [11, 12])))
        assert bench.block(0, 11) == bench.block(0, 1)
        assert not bench.failed
        bench.side.close()
    assert pool.open_clients == 0


def test_close_throws_away_what_waits(bench, monkeypatch) -> None:
    gate = held_copies(bench, monkeypatch)
    bench.save(save(0, run(0, [1, 2])), save(1, run(0, [3, 4], 1)))
    gate.wait_reached()
    closer = threading.Thread(target=bench.side.close)
    closer.start()
    soon(lambda: all(each.cancelled.is_set() for each in bench.side._savings.values()))
    gate.open()
    closer.join(SOON_S)
    assert bench.stored() == set()
    bench.look()
    assert bench.saved == [0, 1]


def test_an_engines_steps_never_meet_the_pool(bench) -> None:
    """Everything but a synchronous load is said to a thread, so that a pool may hang."""
    gate, main = Gate(), threading.current_thread()

    def wait() -> None:
        assert threading.current_thread() is not main
        gate.pass_through()

    bench.pool.on_ask = wait
    bench.save(save(0, run(0, [1, 2])))
    bench.side.start_loads(StepPlan(0, loads=(load(run(0, [11, 12])),)))
    gate.wait_reached()
    bench.look()
    assert (bench.saved, bench.finished) == ([], Finished())
    gate.open()
    bench.until_saved(0)
    soon(lambda: bench.look() or bench.finished.requests)
