"""An engine's namespace: whatever changes the bytes of KV or the meaning of a hash changes it."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_yard import HASH_TOKENS, geometry, group

from kvfabric.actors.engines.vllm.namespace import DEFAULT_SEED, SEED_VARIABLE, engine_namespace
from kvfabric.actors.engines.vllm.settings import ConnectorSettings
from kvfabric.fabric.errors import ConfigError, Unsupported
from kvfabric.fabric.namespace import Namespace


class HfConfig(SimpleNamespace):
    """As much of a model's configuration as is looked at."""

    def to_json_string(self, *, use_diff: bool) -> str:
        assert not use_diff
        return json.dumps(vars(self), sort_keys=True)


def config() -> Any:
    """Return as much of vLLM's configuration as is looked at."""
    hf = HfConfig(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = SimpleNamespace(
        model="org/model",
        revision="abc",
        seed=0,
        quantization=None,
        dtype="bfloat16",
        max_model_len=4096,
        hf_config=hf,
        hf_text_config=hf,
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="e1"),
    )


@pytest.fixture(autouse=True)
def no_seed(monkeypatch) -> None:
    monkeypatch.delenv(SEED_VARIABLE, raising=False)


def namespace(
    change: Callable[[Any], object] = lambda _: None, resets: int = 0, **settings: str
) -> Namespace:
    made = config()
    change(made)
    cache = geometry(group(0, 8), group(1, 8, window=16))
    return engine_namespace(
        made, ConnectorSettings(pool="ipc:///p", **settings), cache, HASH_TOKENS, resets
    )


def put(path: str, value: object) -> Callable[[Any], None]:
    """Return what sets a field of the configuration."""

    def change(made: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            made = getattr(made, part)
        setattr(made, last, value)

    return change


def differing(one: Namespace, other: Namespace) -> set[str]:
    fields = one.fields()
    return {name for name, value in other.fields().items() if fields[name] != value}


def test_what_a_plain_engine_says() -> None:
    said = namespace()
    assert said.model.startswith("org/model@")
    assert (said.weights_version, said.kv_dtype, said.kv_scales) == ("abc", "bfloat16", "none")
    assert said.rope == "rope_theta=10000.0,rope_type=default"
    assert (said.max_model_len, said.chunk_tokens, said.tokens_per_hash) == ("", "8,8", "4")
    assert said.layout == geometry(group(0, 8), group(1, 8, window=16)).layout
    assert (said.hash_algorithm, said.hash_seed) == ("sha256", DEFAULT_SEED)
    assert (said.pipeline_parallel, said.context_parallel, said.tenant) == ("1", "1", "")
    said.refuse_unsupported()
    assert said == namespace()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model_config.model", "org/other", "model"),
        ("model_config.hf_config.hidden_size", 128, "model"),
        ("model_config.quantization", "fp8", "model"),
        ("model_config.dtype", "float16", "model"),
        ("speculative_config", SimpleNamespace(model="draft"), "model"),
        ("model_config.revision", "def", "weights_version"),
        ("load_config.load_format", "dummy", "weights_version"),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor", "hash_algorithm"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel"),
        ("parallel_config.prefill_context_parallel_size", 2, "context_parallel"),
        ("parallel_config.decode_context_parallel_size", 2, "context_parallel"),
    ],
)
def test_what_changes_the_bytes_changes_the_namespace(path, value, field) -> None:
    assert differing(namespace(), namespace(put(path, value))) == {field}


@pytest.mark.parametrize(
    ("path", "value"),
    [("model_config.max_model_len", 8192), ("model_config.seed", 7), ("kv_transfer_config", None)],
)
def test_what_changes_nothing_does_not(path, value) -> None:
    assert namespace(put(path, value)) == namespace()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_hang_on_the_length_bring_the_length_in(kind) -> None:
    def scaled(length: int) -> Namespace:
        def change(made: Any) -> None:
            made.model_config.hf_config.rope_parameters = {"rope_type": kind}
            made.model_config.max_model_len = length

        return namespace(change)

    assert differing(scaled(4096), scaled(8192)) == {"max_model_len"}


def test_old_and_missing_rope_parameters_are_read_too() -> None:
    def older(made: Any) -> None:
        del made.model_config.hf_config.rope_parameters
        made.model_config.hf_config.rope_scaling = {"type": "yarn", "factor": 4.0}

    assert namespace(older).rope == "factor=4.0,type=yarn"

    def none(made: Any) -> None:
        del made.model_config.hf_config.rope_parameters

    assert namespace(none).rope == ""


def test_weights_without_a_revision_have_no_version_and_dummies_have_their_seed() -> None:
    assert namespace(put("model_config.revision", None)).weights_version == ""

    def dummy(made: Any) -> None:
        made.load_config.load_format, made.model_config.seed = "dummy", 3

    assert namespace(dummy).weights_version == "dummy-3"


def test_what_the_user_says_counts_more() -> None:
    said = namespace(model="m", weights_version="7", tenant="t")
    assert (said.model, said.weights_version, said.tenant) == ("m", "7", "t")


def test_the_hash_seed_is_the_environments(monkeypatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "7")
    assert differing(namespace(), namespace()) == set()
    assert namespace().hash_seed == "7"


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_with_a_random_seed_are_refused(algorithm, monkeypatch) -> None:
    change = put("cache_config.prefix_caching_hash_algo", algorithm)
    with pytest.raises(ConfigError, match=SEED_VARIABLE) as caught:
        namespace(change)
    assert caught.value.field == "prefix_caching_hash_algo"
    monkeypatch.setenv(SEED_VARIABLE, "0")
    assert namespace(change).hash_seed == "0"


def test_after_a_reset_the_namespace_is_the_engines_own_and_new() -> None:
    before, once, twice = (namespace(resets=resets, tenant="t") for resets in range(3))
    other = namespace(put("kv_transfer_config.engine_id", "e2"), resets=1, tenant="t")
    assert len({str(each.fields()) for each in (before, once, twice, other)}) == 4
    assert differing(once, other) == {"tenant"}


@pytest.mark.parametrize("size", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_parallelism_that_splits_chunks_is_refused_at_attach(size) -> None:
    with pytest.raises(Unsupported):
        namespace(put(f"parallel_config.{size}", 2)).refuse_unsupported()
