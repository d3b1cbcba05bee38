"""The scheduler's half: a request's life from its first lookup to the end of its last load."""

import pytest
from vllm_yard import HASH_TOKENS, Asked, Desk, DictPool, group, hashes, request

from kvfabric.actors.engines.vllm import scheduler as scheduler_module
from kvfabric.actors.engines.vllm.scheduler import written_blocks
from kvfabric.actors.engines.vllm.settings import PAUSE_S
from kvfabric.actors.engines.vllm.transfers import WorkerReport
from kvfabric.fabric.errors import NamespaceMismatch

TOKENS = 40
"""Ten blocks, five chunks; at most four of them are worth a lookup, because one token must run."""
TABLE = list(range(101, 111))


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


@pytest.fixture
def desk(pool, clock):
    made = Desk(pool, clock)
    yield made
    made.side.close()


def run(desk: Desk, one: Asked, table=TABLE, tokens: int = TOKENS):
    """Admit a request that found nothing, let it run once, and return what the next step saves."""
    assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [table], 0)
    desk.step({one.request_id: [table]}, admitted=[one.request_id], written=table)
    one.ran(tokens)
    return desk.step({one.request_id: [table]})


def test_what_a_request_computed_is_saved_when_its_output_was_seen(desk) -> None:
    one = request()
    assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [TABLE], 0)
    plan = desk.step({"r": [TABLE]}, admitted=["r"], written=TABLE)
    assert (plan.flush, plan.saves, plan.loads) == ((), (), ())
    one.num_computed_tokens = one.num_in_flight_tokens = 20
    assert desk.step({"r": [TABLE]}).saves == ()
    one.num_in_flight_tokens = 0
    ((job,),) = [desk.step({"r": [TABLE]}).saves]
    assert desk.saved(job) == {0: {0: TABLE[:2], 1: TABLE[2:4]}}
    one.ran(20)
    (job,) = desk.step({"r": [TABLE]}).saves
    assert desk.saved(job) == {0: {2: TABLE[4:6], 3: TABLE[6:8], 4: TABLE[8:]}}
    assert desk.step({"r": [TABLE]}).saves == ()


def test_a_save_names_chunks_by_their_last_blocks_hash(desk) -> None:
    (job,) = run(desk, request()).saves
    (saved,) = job.runs
    assert list(saved.digests) == hashes("r", 10)[1::2]


def test_what_was_generated_is_saved_too(desk) -> None:
    one = request(tokens=TOKENS)
    run(desk, one)
    one.block_hashes, one.num_tokens = hashes("r", 12), TOKENS + 9
    one.ran(8)
    (job,) = desk.step({"r": [[*TABLE, 111, 112, 113]]}).saves
    assert desk.saved(job) == {0: {5: [111, 112]}}


def test_tokens_without_a_hash_yet_are_not_saved(desk) -> None:
    one = request(tokens=TOKENS)
    one.block_hashes = one.block_hashes[:7]
    (job,) = run(desk, one).saves
    assert sorted(desk.saved(job)[0]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("held", "local", "tokens"),
    [(5, 0, 32), (3, 0, 24), (3, 8, 16), (3, 24, 0), (3, 32, 0), (0, 0, 0)],
)
def test_what_the_pool_has_beyond_the_local_prefix_is_promised(desk, held, local, tokens) -> None:
    one = request()
    desk.put(one, held)
    assert desk.side.matched(one, local) == tokens


def test_less_than_a_chunk_and_a_token_is_not_looked_up(desk) -> None:
    one = request(tokens=8)
    desk.put(one, 1)
    assert desk.side.matched(one, 0) == 0


def test_a_load_fills_the_blocks_behind_the_local_prefix(desk) -> None:
    one = request()
    desk.put(one, 4)
    assert desk.side.matched(one, 12) == 20
    desk.side.allocated(one, [TABLE], 20)
    plan = desk.step({})
    (load,) = plan.loads
    assert load.request_id == "r"
    (loaded,) = load.runs
    assert (loaded.first, list(loaded.digests)) == (1, hashes("r", 10)[3:8:2])
    assert list(loaded.block_ids) == [0, *TABLE[3:8]]
    assert desk.step({}).loads == ()


def test_after_a_load_only_the_rest_is_saved(desk) -> None:
    one = request()
    desk.put(one, 4)
    desk.load(one, [TABLE])
    one.num_computed_tokens = 32
    desk.side.allocated(one, [TABLE], 0)
    assert desk.step({"r": [TABLE]}, admitted=["r"], written=TABLE[8:]).saves == ()
    one.ran(8)
    (job,) = desk.step({"r": [TABLE]}).saves
    assert desk.saved(job) == {0: {4: TABLE[8:]}}


def test_a_load_that_failed_is_never_promised_again_and_the_rest_is_saved_anew(desk) -> None:
    one = request()
    desk.put(one, 4)
    desk.load(one, [TABLE], failed=True)
    for _ in range(3):
        assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [TABLE], 0)
    desk.step({"r": [TABLE]}, admitted=["r"], written=TABLE)
    one.ran(TOKENS)
    (job,) = desk.step({"r": [TABLE]}).saves
    assert sorted(desk.saved(job)[0]) == [0, 1, 2, 3, 4]
    other = request("other")
    desk.put(other, 1)
    assert desk.side.matched(other, 0) == 8


def test_a_step_flushes_saves_whose_blocks_it_gives_away(desk) -> None:
    (job,) = run(desk, request()).saves
    assert desk.step({}, written=[200]).flush == ()
    assert desk.step({}, written=[TABLE[3], 200]).flush == (job.job,)
    desk.saved_by_workers(job)
    assert desk.step({}, written=[TABLE[3]]).flush == ()
    assert not desk.books()


def test_a_load_flushes_saves_whose_blocks_it_fills(desk) -> None:
    (job,) = run(desk, request()).saves
    one = request("s")
    desk.put(one, 4)
    assert desk.side.matched(one, 0) == 32
    desk.side.allocated(one, [[1, 2, 3, 4, TABLE[0], 5, 6, 7, 8, 9]], 32)
    assert desk.step({}).flush == (job.job,)


def test_a_request_leaves_what_it_did_not_save(desk) -> None:
    one = request()
    run(desk, one, tokens=20)
    one.ran(20)
    assert desk.side.finished(one, [TABLE]) is None
    assert not desk.side._requests
    (job,) = desk.step({}).saves
    assert sorted(desk.saved(job)[0]) == [2, 3, 4]


def test_what_it_left_is_not_saved_where_the_blocks_are_somebodys(desk) -> None:
    one = request()
    run(desk, one, tokens=20)
    one.ran(20)
    desk.side.finished(one, [TABLE])
    assert desk.step({}, written=[TABLE[4]]).saves == ()
    assert desk.step({}).saves == ()


def test_a_preempted_request_saves_when_it_has_computed_again(desk) -> None:
    one = request()
    run(desk, one, tokens=12)
    one.num_computed_tokens = 0
    other = list(range(201, 211))
    desk.step({}, written=TABLE)
    desk.put(one, 1)
    assert desk.side.matched(one, 8) == 0
    one.num_computed_tokens = 8
    desk.side.allocated(one, [other], 0)
    assert desk.step({"r": [other]}, admitted=["r"], written=other[2:]).saves == ()
    one.ran(16)
    (job,) = desk.step({"r": [other]}).saves
    assert desk.saved(job) == {0: {1: other[2:4], 2: other[4:6]}}


def test_a_request_that_is_aborted_while_it_loads_is_known_until_the_load_is_over(desk) -> None:
    one = request()
    desk.put(one, 4)
    assert desk.side.matched(one, 0) == 32
    desk.side.allocated(one, [TABLE], 32)
    desk.step({})
    one.num_computed_tokens = 32
    assert desk.side.finished(one, [TABLE]) is None
    assert desk.books()
    desk.side.observed(None, ["r"])
    assert not desk.books()
    assert desk.step({}).saves == ()


def test_a_synchronous_load_is_over_with_its_step(pool, clock) -> None:
    desk = Desk(pool, clock, load="sync")
    one = request()
    desk.put(one, 4)
    assert desk.side.matched(one, 0) == 32
    desk.side.allocated(one, [TABLE], 32)
    one.num_computed_tokens = 32
    assert len(desk.step({"r": [TABLE]}, admitted=["r"], written=TABLE[8:]).loads) == 1
    one.ran(8)
    desk.side.observed(WorkerReport(failed_loads=["r"]), [])
    desk.side.step_over()
    assert not desk.side._requests["r"].loading
    one.num_computed_tokens = 16
    assert desk.step({"r": [TABLE]}).saves == ()
    one.ran(24)
    (job,) = desk.step({"r": [TABLE]}).saves
    assert sorted(desk.saved(job)[0]) == [0, 1, 2, 3, 4]
    desk.side.finished(one, [TABLE])
    desk.saved_by_workers(job)
    assert not desk.books()


def test_after_a_reset_nothing_of_before_is_found_saved_or_loaded(desk, pool) -> None:
    running, loading, waiting = request("running"), request("loading"), request("waiting")
    run(desk, running, tokens=20)
    desk.put(loading, 4)
    desk.put(waiting, 4)
    assert desk.side.matched(loading, 0) == 32
    desk.side.allocated(loading, [list(range(201, 211))], 32)
    done = request("done")
    run(desk, done, list(range(301, 311)), tokens=8)
    done.ran(32)
    desk.side.finished(done, [list(range(301, 311))])
    desk.side.reset()
    assert [client.reset for client in pool.clients if not client.closed] == [1]
    assert desk.side.matched(waiting, 0) == 0
    running.ran(20)
    plan = desk.step({"running": [TABLE]})
    assert (plan.reset, plan.saves) == (1, ())
    desk.side.observed(None, ["loading"])
    assert desk.side.matched(loading, 0) == 0
    # What it computes anew is saved.
    running.num_computed_tokens = 0
    desk.step({"running": [TABLE]}, admitted=["running"], written=TABLE)
    running.ran(TOKENS)
    (job,) = desk.step({"running": [TABLE]}).saves
    assert sorted(desk.saved(job)[0]) == [0, 1, 2, 3, 4]


def test_a_pool_that_is_away_costs_nothing_and_gets_nothing(pool, clock) -> None:
    pool.silence()
    desk = Desk(pool, clock)
    assert run(desk, request()).saves == ()
    done = request("s")
    run(desk, done, list(range(201, 211)))
    desk.side.finished(done, [list(range(201, 211))])
    assert desk.step({}).saves == ()
    desk.side.close()


def test_a_pool_that_the_workers_found_silent_is_left_alone(desk, clock) -> None:
    one = request()
    desk.put(one, 4)
    desk.side.observed(WorkerReport(silent=True), [])
    assert desk.side.matched(one, 0) == 0
    clock.advance_s(PAUSE_S)
    assert desk.side.matched(one, 0) == 32


def test_a_pool_that_refuses_is_an_error_at_the_start(pool, clock) -> None:
    pool.refusal = NamespaceMismatch("layout", "a", "b")
    with pytest.raises(NamespaceMismatch):
        Desk(pool, clock)


def test_no_more_saves_wait_than_allowed(desk, monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "SAVES_WAITING_MAX", 2)
    jobs = []
    for number in range(4):
        one = request(str(number))
        run(desk, one, tokens=20)
        one.ran(20)
        desk.side.finished(one, [TABLE])
        jobs += desk.step({}).saves
        assert len(desk.side._fence) <= 2
    desk.side.observed(WorkerReport(saved=[0, 1]), [])
    assert not desk.books()
    assert len(run(desk, request("later")).saves) == 1


def test_who_asks_for_it_hears_where_to_pull_from(pool, clock) -> None:
    pool.peer_endpoint = "tcp://10.0.0.1:7"
    desk = Desk(pool, clock)
    prefill = request(kv_transfer_params={"remote_decoder": {"remote_host": "h"}})
    run(desk, prefill)
    said = desk.side.finished(prefill, [TABLE])
    assert said == {"remote_prefiller": {"remote_host": "10.0.0.1", "remote_port": 7}}
    assert desk.side.finished(request("unknown"), [TABLE]) is None
    desk.side.observed(WorkerReport(silent=True), [])
    assert desk.side.finished(prefill, [TABLE]) is None
    desk.side.close()


def test_a_chunk_counts_if_all_ranks_have_it_and_a_save_ends_with_the_last(pool, clock) -> None:
    desk = Desk(pool, clock, size=2)
    one = request()
    desk.put(one, 4)
    for key in [key for key in pool.chunks if key[1][-1] == 1][2:]:
        del pool.chunks[key]
    assert desk.side.matched(one, 0) == 16
    desk.side.allocated(one, [TABLE], 0)
    desk.step({"r": [TABLE]}, admitted=["r"])
    one.ran(TOKENS)
    (job,) = desk.step({"r": [TABLE]}).saves
    assert sorted(desk.saved(job)[0]) == [2, 3, 4]
    desk.side.observed(WorkerReport(saved=[job.job]), [])
    assert desk.step({}, written=TABLE[4:]).flush == (job.job,)
    desk.side.observed(WorkerReport(saved=[job.job]), [])
    desk.side.finished(one, [TABLE])
    assert not desk.books()
    desk.side.close()


HYBRID = (group(0, 8), group(1, 8, window=12))


def test_blocks_that_left_a_window_are_saved_while_nobody_has_them(pool, clock) -> None:
    desk = Desk(pool, clock, *HYBRID)
    one = request()
    window = list(range(201, 211))
    assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [TABLE, window], 0)
    desk.step({"r": [TABLE, window[:5]]}, admitted=["r"])
    one.ran(20)
    # Of the first chunk one block is somebody's now, of the second none.
    given = desk.step({"r": [TABLE, [0, 0, 0, *window[3:]]]}, written=window[:1])
    (job,) = given.saves
    assert desk.saved(job) == {0: {0: TABLE[:2], 1: TABLE[2:4]}, 1: {1: window[2:4]}}
    one.ran(20)
    desk.side.finished(one, [TABLE, [0] * 8 + window[8:]])
    (job,) = desk.step({}).saves
    assert sorted(desk.saved(job)[1]) == [2, 3, 4]
    assert desk.saved(job)[1][2] == window[4:6]
    desk.side.close()


def test_a_request_that_comes_back_forgets_blocks_of_before(pool, clock) -> None:
    desk = Desk(pool, clock, *HYBRID)
    one, window = request(), list(range(201, 211))
    assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [TABLE, window], 0)
    desk.step({"r": [TABLE, window]}, admitted=["r"])
    one.num_computed_tokens = 0
    desk.side.reset()
    desk.put(one, 4)
    pool.chunks = {(1, key): data for (_, key), data in pool.chunks.items()}
    assert desk.side.matched(one, 0) == 32
    one.num_computed_tokens = 32
    desk.side.observed(WorkerReport(failed_loads=["r"]), [])
    tables = [TABLE, [0] * 5 + list(range(306, 311))]
    desk.step({"r": tables}, admitted=["r"])
    one.ran(8)
    (job,) = desk.step({"r": tables}).saves
    assert sorted(desk.saved(job)[1]) == [3, 4]
    desk.side.close()


def test_reports_of_requests_that_nobody_knows_are_nothing(desk) -> None:
    desk.side.observed(WorkerReport([7], ["x"]), ["y"])
    desk.side.step_over()
    plan = desk.step({"z": [TABLE]}, admitted=["z"])
    assert (plan.saves, plan.loads) == ((), ())
    assert not desk.books()


def test_blocks_that_a_step_gives_away_are_those_behind_the_computed_tokens() -> None:
    sizes = {0: HASH_TOKENS, 1: 2 * HASH_TOKENS}
    new = [(8, ([1, 2, 3, 4], [11, 12])), (0, ([5], [13]))]
    cached = [(8, ([6], [])), (9, None), (4, ([7], [14]))]
    assert sorted(written_blocks(new, cached, sizes)) == [3, 4, 5, 6, 7, 12, 13, 14]
    assert written_blocks([], [], sizes) == []
    assert written_blocks([(10, ([1, 2, 3],))], [], sizes) == [3]
    assert written_blocks([(10, ([], [], [1, 2]))], [], sizes) == [1, 2]
