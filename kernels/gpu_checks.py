"""Every check that needs a GPU, as one script: `python -m kvfabric.kernels.gpu_checks`.

Each kernel runs against its numpy twin, bit for bit, into poisoned memory, and its copies are timed
against the device's own copy of the same bytes. The whole takes under 8 minutes. Prints one JSON
line per check; exits 1 if one fails, and 0 with a sentence where there is no GPU.

Under TRITON_INTERPRET=1 the comparisons run on the CPU in Triton's interpreter, and nothing is
timed. The variable is read when Triton is first imported, so this needs a process of its own.
"""
# The lines of this script are its result.
# ruff: noqa: T201

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from triton import knobs

from ..fabric.layout import GroupKind, GroupLayout
from .pack import CacheOrder, EngineCacheView, Packer
from .pack.naive import NumpyPacker

POISON = 0xA5
"""What memory holds before a kernel runs. Where it must not write, this must remain."""


@dataclass(frozen=True, slots=True)
class PackCase:
    """A group as one rank of one engine keeps it."""

    name: str
    group: GroupLayout
    block_tokens: int
    order: CacheOrder = CacheOrder.NHD
    """For DENSE only."""
    rank: int = 0
    size: int = 1
    chunks: int = 2
    skew_bytes: int = 0
    """Moves chunks off their alignment by so much, so that narrower words are used."""


def _dense(heads: int, dim: int, element: int, blocks: int, layers: int = 2) -> GroupLayout:
    return GroupLayout.dense(layers, heads, dim, element, blocks * 4)


PACK_CASES = (
    PackCase("nhd bf16", _dense(4, 32, 2, 4), 4),
    PackCase("hnd bf16", _dense(4, 32, 2, 4), 4, CacheOrder.HND),
    PackCase("blocks-nhd bf16, rank 1 of 2", _dense(4, 32, 2, 4), 4, CacheOrder.BLOCKS_NHD, 1, 2),
    PackCase("blocks-hnd bf16, rank 3 of 4", _dense(4, 32, 2, 4), 4, CacheOrder.BLOCKS_HND, 3, 4),
    PackCase("replicated heads, rank 3 of 4", _dense(2, 16, 2, 1), 4, CacheOrder.HND, 3, 4),
    PackCase("fp8, odd everything", _dense(3, 5, 1, 1, 3), 4, CacheOrder.NHD, 1, 3),
    PackCase("fp32, odd heads", _dense(3, 6, 4, 4), 4, CacheOrder.BLOCKS_HND),
    PackCase("16 blocks of 1 token", GroupLayout.dense(1, 2, 8, 2, 16), 1),
    PackCase("misaligned chunks", _dense(2, 32, 2, 1), 4, CacheOrder.HND, skew_bytes=2),
    PackCase("several tiles", GroupLayout.dense(1, 8, 128, 2, 16), 16, chunks=1),
    PackCase("mla 656", GroupLayout.mla(2, 656, 8), 4),
    PackCase("mla 132, padded rows", GroupLayout.mla(3, 132, 16), 4),
    PackCase("mla 577, bytes", GroupLayout.mla(1, 577, 4), 4, rank=1, size=2),
    PackCase("state", GroupLayout.state(2, (24, 640, 6), 16), 16, rank=1, size=2),
)


def make_caches(
    case: PackCase, num_blocks: int, rng: np.random.Generator, device: str
) -> list[EngineCacheView]:
    """Return random caches of this case, one tensor per layer."""
    return [_make_cache(case, num_blocks, rng, device) for _ in range(case.group.layers)]


def _make_cache(
    case: PackCase, num_blocks: int, rng: np.random.Generator, device: str
) -> EngineCacheView:
    group, share = case.group, case.group.share(case.rank, case.size)

    def filled(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).to(device)

    if group.kind is GroupKind.MLA:
        return EngineCacheView.mla(filled(num_blocks, case.block_tokens, group.row_bytes))
    if group.kind is GroupKind.STATE:
        runs = group.section_runs(0, share)
        blob = filled(num_blocks, sum(run.length for run in runs))
        return EngineCacheView.state_blob(blob, [run.length for run in runs])
    tokens_heads = (case.block_tokens, share.head_count)
    if not case.order.tokens_first:
        tokens_heads = tokens_heads[::-1]
    outer = (2, num_blocks) if case.order.halves_axis == 0 else (num_blocks, 2)
    cache = filled(*outer, *tokens_heads, group.head_dim * group.element_bytes)
    return EngineCacheView.dense(cache, case.order)


MakePacker = Callable[[GroupLayout, list[EngineCacheView], int, int], Packer]


def check_pack(case: PackCase, packer: MakePacker, device: str, seed: int = 0) -> None:
    """Compare a packer on a device with the twin, both ways. Raises `AssertionError`."""
    rng = np.random.default_rng(seed)
    per_chunk = case.group.blocks_per_chunk(case.block_tokens)
    num_blocks = case.chunks * per_chunk + 3
    caches = make_caches(case, num_blocks, rng, device)
    twins = [_same_axes(view, case.group) for view in caches]
    tested = packer(case.group, caches, case.rank, case.size)
    twin = NumpyPacker(case.group, twins, case.rank, case.size)
    ids = rng.permutation(num_blocks)[: case.chunks * per_chunk].reshape(case.chunks, per_chunk)
    ids[-1, -1] = -1
    slots = rng.permutation(case.chunks + 1)[: case.chunks]
    ids_there, slots_there = torch.from_numpy(ids).to(device), torch.from_numpy(slots).to(device)

    width = case.group.chunk_bytes + 48
    expected = np.full((case.chunks + 1, width), POISON, np.uint8)
    memory = torch.full((expected.size + 16,), POISON, dtype=torch.uint8, device=device)
    chunks = memory[case.skew_bytes : case.skew_bytes + expected.size].view(expected.shape)
    twin.pack(ids, expected, slots)
    tested.pack(ids_there, chunks, slots_there)
    _require_equal(case, "packed chunks", chunks.cpu().numpy(), expected)
    assert (memory[case.skew_bytes + expected.size :] == POISON).all(), f"{case.name}: overrun"

    content = rng.integers(0, 256, expected.shape, dtype=np.uint8)
    chunks.copy_(torch.from_numpy(content))
    twin.unpack(ids, content, slots)
    tested.unpack(ids_there, chunks, slots_there)
    _require_equal(case, "chunks that were read", chunks.cpu().numpy(), content)
    for view, other in zip(caches, twins, strict=True):
        for part, wanted in zip(view.parts, other.parts, strict=True):
            found = torch.as_tensor(part.data).cpu().numpy()
            _require_equal(case, "unpacked cache", found, wanted.array)


def check_far(packer: MakePacker, device: str) -> None:
    """Move blocks that lie past 4 GiB, byte by byte, so that an index in 32 bits would wrap.

    The cache is one lazily backed allocation, of which a few pages are touched on a CPU.
    """
    group = GroupLayout.mla(1, 1023, 4)
    num_blocks = (1 << 32) // (4 * 1023) + 8
    cache = torch.empty((num_blocks, 4, 1023), dtype=torch.uint8, device=device)
    rows = np.random.default_rng(2).integers(0, 256, (2, 4, 1023), dtype=np.uint8)
    wanted = np.zeros((2, 4, group.row_stride_bytes), np.uint8)
    wanted[:, :, :1023] = rows
    cache[-2:] = torch.from_numpy(rows).to(device)
    ids = torch.tensor([[num_blocks - 2], [num_blocks - 1]], device=device)
    slots = torch.arange(2, device=device)
    chunks = torch.full((2, group.chunk_bytes), POISON, dtype=torch.uint8, device=device)
    tested = packer(group, [EngineCacheView.mla(cache)], 0, 1)
    tested.pack(ids, chunks, slots)
    np.testing.assert_array_equal(chunks.cpu().numpy().reshape(wanted.shape), wanted, "far pack")
    cache[-2:] = POISON
    tested.unpack(ids, chunks, slots)
    np.testing.assert_array_equal(cache[-2:].cpu().numpy(), rows, "far unpack")


def check_out_of_range(packer: MakePacker, device: str) -> None:
    """Give ids and slots that nothing has: they must be skipped, and the rest be moved."""
    group = GroupLayout.mla(2, 64, 8)
    rows = np.random.default_rng(3).integers(0, 256, (2, 4, 4, 64), dtype=np.uint8)
    cache = torch.from_numpy(rows).to(device)
    # What lies before and behind the slots would be written if they were not checked.
    memory = torch.full((5, group.chunk_bytes), POISON, dtype=torch.uint8, device=device)
    chunks = memory[1:4]
    ids = torch.tensor([[0, 1], [2, 3], [4, -1], [3, 0]], device=device)
    slots = torch.tensor([3, -1, 0, 1], device=device)
    tested = packer(group, [EngineCacheView.mla(layer) for layer in cache], 0, 1)
    tested.pack(ids, chunks, slots)
    wanted = np.full((5, group.chunk_bytes), POISON, np.uint8)
    wanted[2] = rows[:, [3, 0]].ravel()
    np.testing.assert_array_equal(memory.cpu().numpy(), wanted, "out of range: pack")
    tested.unpack(ids, chunks, slots)
    np.testing.assert_array_equal(cache.cpu().numpy(), rows, "out of range: unpack")


def _same_axes(view: EngineCacheView, group: GroupLayout) -> EngineCacheView:
    copies = [torch.as_tensor(part.data).cpu().numpy().copy(order="C") for part in view.parts]
    if group.kind is GroupKind.DENSE:
        return EngineCacheView.split(copies[0], copies[1], tokens_first=False)
    if group.kind is GroupKind.MLA:
        return EngineCacheView.mla(copies[0][:, 0])
    return EngineCacheView.state(*copies)


def _require_equal(case: PackCase, what: str, found: object, wanted: object) -> None:
    np.testing.assert_array_equal(found, wanted, f"{case.name}: {what}")


GIB = 1 << 30

REPEATS = 7
"""Timed runs of a copy; their median is reported."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes moved per second, and the same by a plain copy on the same device."""

    name: str
    gib_per_s: float
    copy_gib_per_s: float


def measure_pack(order: CacheOrder, *, pinned: bool) -> list[Speed]:
    """Time both directions for 32 layers of 8 heads of 128 in bf16, 16 chunks of 256 tokens."""
    from .pack.triton import TritonPacker

    group = GroupLayout.dense(32, 8, 128, 2, 256)
    case = PackCase("speed", group, 16, order, chunks=16)
    num_blocks = case.chunks * 16
    caches = make_caches(case, num_blocks, np.random.default_rng(0), "cuda")
    packer = TritonPacker(group, caches)
    ids = torch.randperm(num_blocks, device="cuda").view(case.chunks, 16)
    slots = torch.arange(case.chunks, device="cuda")
    shape = (case.chunks, group.chunk_bytes)
    here = torch.empty(shape, dtype=torch.uint8, device="cuda")
    chunks = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pinned else here
    source = torch.empty_like(here)
    moved = case.chunks * group.chunk_bytes / GIB

    def rate(work: Callable[[], object]) -> float:
        return moved / median(_seconds(work) for _ in range(REPEATS))

    where = "pinned host" if pinned else "device"
    ways: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        (
            "pack",
            lambda: packer.pack(ids, chunks, slots),
            lambda: chunks.copy_(source, non_blocking=True),
        ),
        (
            "unpack",
            lambda: packer.unpack(ids, chunks, slots),
            lambda: source.copy_(chunks, non_blocking=True),
        ),
    ]
    return [
        Speed(f"{name} {order.name} {where}", rate(kernel), rate(copy))
        for name, kernel, copy in ways
    ]


def _seconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def check_graph() -> None:
    """Capture a pack in a graph, change the ids in place, replay: the new blocks must be there."""
    from .pack.triton import TritonPacker

    case = PACK_CASES[0]
    caches = make_caches(case, 16, np.random.default_rng(1), "cuda")
    packer = TritonPacker(case.group, caches)
    per_chunk = case.group.blocks_per_chunk(case.block_tokens)
    ids = torch.arange(per_chunk, device="cuda").view(1, per_chunk)
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    chunks = torch.empty((1, case.group.chunk_bytes), dtype=torch.uint8, device="cuda")
    packer.pack(ids, chunks, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packer.pack(ids, chunks, slots)
    ids += per_chunk
    graph.replay()
    replayed = chunks.clone()
    packer.pack(ids, chunks, slots)
    assert torch.equal(replayed, chunks), "a replayed pack differs from a direct one"


def run_checks(checks: Sequence[tuple[str, Callable[[], object]]]) -> int:
    """Run them all, print one line each, return how many failed."""
    failed = 0
    for name, check in checks:
        problem = ""
        try:
            check()
        except AssertionError as error:
            problem, failed = str(error), failed + 1
        print(json.dumps({"check": name, "ok": not problem, "problem": problem}), flush=True)
    return failed


def comparisons(device: str) -> list[tuple[str, Callable[[], object]]]:
    """Return the checks of every kernel against its twin."""
    from .pack.triton import TritonPacker

    checks: list[tuple[str, Callable[[], object]]] = [
        (f"pack: {case.name}", lambda case=case: check_pack(case, TritonPacker, device))
        for case in PACK_CASES
    ]
    return [
        *checks,
        ("pack: past 4 GiB", lambda: check_far(TritonPacker, device)),
        ("pack: ids and slots out of range", lambda: check_out_of_range(TritonPacker, device)),
    ]


def main() -> int:
    """Run everything; return the exit status."""
    if knobs.runtime.interpret:
        return 1 if run_checks(comparisons("cpu")) else 0
    if not torch.cuda.is_available():
        print("no GPU here, nothing checked")
        return 0
    checks = [*comparisons("cuda"), ("pack: captured in a graph", check_graph)]
    failed = run_checks(checks)
    for order in (CacheOrder.NHD, CacheOrder.HND):
        for pinned in (False, True):
            for speed in measure_pack(order, pinned=pinned):
                line = {
                    "bench": "pack",
                    "metric": speed.name,
                    "value": round(speed.gib_per_s, 1),
                    "unit": "GiB/s",
                    "reference": round(speed.copy_gib_per_s, 1),
                    "ratio": round(speed.gib_per_s / speed.copy_gib_per_s, 3),
                }
                print(json.dumps(line), flush=True)
    print(
        f"{len(checks) - failed} of {len(checks)} checks passed on {torch.cuda.get_device_name()}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
