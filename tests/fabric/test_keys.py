"""Block hashes and chunk keys against vLLM's own: golden values and real captures."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric import events
from kvfabric.fabric.errors import ConfigError, Malformed
from kvfabric.fabric.events import BlockStored
from kvfabric.fabric.keys import (
    BlockHasher,
    ChainEnd,
    ExtraKeys,
    HashAlgorithm,
    MultimodalItem,
    block_extra,
    low64,
)
from kvfabric.fabric.types import (
    KeyBatch,
    key_digest,
    key_group,
    key_low64,
    make_key,
    make_keys,
)

CAPTURES = Path(__file__).parents[1] / "golden" / "vllm_events"
PICKLE = BlockHasher(HashAlgorithm.SHA256, None, 16)
CBOR = BlockHasher(HashAlgorithm.SHA256_CBOR, None, 16)


def batches(name):
    data = (CAPTURES / f"{name}.bin").read_bytes()
    frames, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    per_message = 4 if "replay" in name else 3
    for start in range(0, len(frames), per_message):
        payload = frames[start + per_message - 1]
        if payload:
            yield events.decode_batch(payload)


def test_golden_sha256():
    first, second = PICKLE.hash_blocks(range(32))
    assert PICKLE.none_hash.hex() == (
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    )
    assert first.hex() == "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798"
    assert second.hex() == "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629"
    assert low64([first, second]).tolist() == [3262291359910021016, 7142137847444424233]


def test_golden_sha256_cbor():
    assert CBOR.none_hash.hex() == (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    )
    assert CBOR.hash_blocks(range(16))[0].hex() == (
        "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
    )


def test_golden_extra_keys():
    extra = ExtraKeys(
        lora_name="tiny",
        lora_path="./tiny",
        multimodal=(MultimodalItem("img", 12, 8),),
        cache_salt="tenant-1",
    )
    assert block_extra(extra, 0, 16) == (
        ("lora", "tiny", "./tiny"),
        ("mm", "img", 12),
        ("cache_salt", "tenant-1"),
    )
    assert block_extra(extra, 16, 32) == (("lora", "tiny", "./tiny"), ("mm", "img", -4))
    assert block_extra(extra, 32, 48) == (("lora", "tiny", "./tiny"),)
    assert block_extra(ExtraKeys(), 0, 16) is None


@pytest.mark.parametrize(
    ("name", "algorithm", "seed", "salts"),
    [
        ("bs128_basic", HashAlgorithm.SHA256, None, False),
        ("bs32_basic", HashAlgorithm.SHA256, None, False),
        ("bs16_basic", HashAlgorithm.SHA256, None, False),
        ("bs32_eviction", HashAlgorithm.SHA256, None, False),
        ("bs32_bytes_hash_sha256", HashAlgorithm.SHA256, None, False),
        ("bs32_bytes_hash_sha256_cbor_seed0", HashAlgorithm.SHA256_CBOR, "0", False),
        ("bs32_cache_salt", HashAlgorithm.SHA256, None, True),
        ("bs32_replay_from0", HashAlgorithm.SHA256, None, False),
        ("pd_dict_prefill", HashAlgorithm.SHA256, None, False),
        ("pd_dict_decode", HashAlgorithm.SHA256, None, False),
        ("p2p_A", HashAlgorithm.SHA256, None, False),
        ("pd_tiering_prefill", HashAlgorithm.SHA256, None, False),
        ("pd_tiering_decode", HashAlgorithm.SHA256, None, False),
        ("offload_CpuHostOffloadingSpec", HashAlgorithm.SHA256, None, False),
        ("offload_tiering_fs_events", HashAlgorithm.SHA256, None, False),
        ("offload_tiering_fs_selfdesc", HashAlgorithm.SHA256, None, False),
        ("offload_tiering_oot", HashAlgorithm.SHA256, None, False),
    ],
)
def test_captured_hashes_are_reproduced(name, algorithm, seed, salts):
    chains: dict[int, ChainEnd] = {}
    hashes = 0
    for batch in batches(name):
        for event in batch.events:
            if not isinstance(event, BlockStored) or event.medium != "GPU":
                continue
            hasher = BlockHasher(algorithm, seed, event.block_size)
            after = None
            if event.parent_block_hash is not None:
                after = chains[events.hash_low64(event.parent_block_hash)]
            salt = ""
            if salts and event.extra_keys and event.extra_keys[0]:
                (salt,) = event.extra_keys[0]
            digests = hasher.hash_blocks(event.token_ids, ExtraKeys(cache_salt=salt), after)
            expected = events.hashes_low64(event.block_hashes)
            assert low64(digests).tolist() == expected
            if isinstance(event.block_hashes[0], bytes):
                assert tuple(digests) == event.block_hashes
            start = 0 if after is None else after.tokens
            for index, digest in enumerate(digests):
                end = start + (index + 1) * event.block_size
                chains[expected[index]] = ChainEnd(digest, end)
            hashes += len(digests)
    assert hashes > 0


@pytest.mark.parametrize("blocks_per_chunk", [1, 4, 16])
@pytest.mark.parametrize("hasher", [PICKLE, CBOR], ids=["sha256", "sha256_cbor"])
def test_chunk_key_is_the_hash_of_its_last_block(hasher, blocks_per_chunk):
    tokens = np.arange(16 * 35 + 5, dtype=np.int32)
    blocks = hasher.hash_blocks(tokens)
    assert len(blocks) == 35
    keys = hasher.chunk_keys(tokens, 16 * blocks_per_chunk, group=3)
    assert [key_digest(key) for key in keys] == blocks[blocks_per_chunk - 1 :: blocks_per_chunk]
    assert len(keys) == 35 // blocks_per_chunk
    assert {key_group(key) for key in keys} == {3}
    assert [key_low64(key) for key in keys] == low64([key_digest(key) for key in keys]).tolist()


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 200_000), max_size=80),
    cut=st.integers(0, 20),
    lora=st.booleans(),
    salt=st.sampled_from(["", "s"]),
    offset=st.integers(0, 40),
)
def test_continuing_a_chain_equals_hashing_it_whole(tokens, cut, lora, salt, offset):
    hasher = BlockHasher(HashAlgorithm.SHA256_CBOR, None, 4)
    extra = ExtraKeys("a" if lora else "", "", (MultimodalItem("m", offset, 7),), salt)
    whole = hasher.hash_blocks(tokens, extra)
    cut = min(cut, len(whole))
    head = whole[:cut]
    after = ChainEnd(head[-1], cut * 4) if head else hasher.root
    assert head + hasher.hash_blocks(tokens[cut * 4 :], extra, after) == whole


def test_every_part_of_the_triple_changes_the_hash():
    base = CBOR.hash_blocks(range(32))
    for extra in (
        ExtraKeys(lora_name="a"),
        ExtraKeys(lora_name="a", lora_path="p"),
        ExtraKeys(cache_salt="t"),
        ExtraKeys(multimodal=(MultimodalItem("m", 0, 4),)),
        ExtraKeys(multimodal=(MultimodalItem("m", 1, 4),)),
    ):
        other = CBOR.hash_blocks(range(32), extra)
        assert not set(other) & set(base)
    seeded = BlockHasher(HashAlgorithm.SHA256_CBOR, "0", 16)
    assert not set(seeded.hash_blocks(range(32))) & set(base)


def test_refusals_name_the_field():
    with pytest.raises(ConfigError, match="chunk_tokens: 24 is not a multiple"):
        CBOR.chunk_keys(range(64), 24, 0)
    with pytest.raises(ConfigError, match="chunk_tokens: 0"):
        CBOR.chunk_keys(range(64), 0, 0)
    with pytest.raises(ConfigError, match="tokens_per_hash"):
        BlockHasher(HashAlgorithm.SHA256, None, 0)
    with pytest.raises(ConfigError, match="after"):
        CBOR.hash_blocks(range(64), after=ChainEnd(b"x" * 32, 8))
    with pytest.raises(ConfigError, match="chunk boundary"):
        CBOR.chunk_keys(range(64), 32, 0, after=ChainEnd(b"x" * 32, 16))
    assert CBOR.chunk_keys(range(15), 16, 0) == []
    assert low64([]).tolist() == []


@given(st.sampled_from([16, 32]), st.integers(0, 20), st.integers(0, (1 << 32) - 1), st.data())
def test_keys_made_at_once_are_those_made_one_by_one(size, count, group, data):
    digests = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(count)]
    keys = [make_key(digest, group) for digest in digests]
    batch = KeyBatch(digests, group)
    assert make_keys(digests, group) == list(batch) == keys
    assert len(batch) == count
    assert batch[1:-1] == keys[1:-1]
    assert [batch[at] for at in range(-count, count)] == keys * 2
    with pytest.raises(IndexError):
        batch[count]


def test_digests_of_several_lengths_are_no_batch():
    with pytest.raises(Malformed, match="not all equally long"):
        KeyBatch([bytes(32), bytes(16)], 0)
