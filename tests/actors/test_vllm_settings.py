"""The connector's settings: every bad value is one sentence that names the field."""

from pathlib import Path

import pytest

from kvfabric.actors.engines.vllm.settings import (
    POOL_VARIABLE,
    ConnectorSettings,
    LoadMode,
    read_settings,
)
from kvfabric.fabric.errors import ConfigError

POOL = "ipc:///run/pool.sock"


def test_a_pool_is_enough() -> None:
    settings = read_settings({"pool": POOL}, {})
    assert settings == ConnectorSettings(pool=POOL)
    assert (settings.load, settings.chunk_tokens) == (LoadMode.ASYNC, None)
    assert (settings.model, settings.weights_version, settings.tenant) == ("", "", "")
    assert settings.load_wait_s == 1.5


@pytest.mark.parametrize("extra", [{}, {"pool": ""}, {"pool": None}])
def test_the_variable_names_the_pool_where_the_configuration_does_not(extra) -> None:
    assert read_settings(extra, {POOL_VARIABLE: POOL}).pool == POOL
    with pytest.raises(ConfigError, match=POOL_VARIABLE) as caught:
        read_settings(extra, {})
    assert caught.value.field == "kv_connector_extra_config.pool"


def test_the_configuration_counts_more_than_the_variable() -> None:
    assert read_settings({"pool": POOL}, {POOL_VARIABLE: "ipc:///other"}).pool == POOL


def test_what_vllm_hands_over_is_not_changed() -> None:
    extra = {"load": "sync"}
    assert read_settings(extra, {POOL_VARIABLE: POOL}).load is LoadMode.SYNC
    assert extra == {"load": "sync"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool", 7),
        ("pool", 0),
        ("pool", []),
        ("pool", ["ipc://x"]),
        ("load", "maybe"),
        ("load", None),
        ("load", 1),
        ("chunk_tokens", 0),
        ("chunk_tokens", -16),
        ("chunk_tokens", 1.5),
        ("chunk_tokens", "many"),
        ("chunk_tokens", []),
        ("model", 7),
        ("model", None),
        ("weights_version", 2),
        ("tenant", {}),
        ("load_wait_s", -0.1),
        ("load_wait_s", 31),
        ("load_wait_s", float("nan")),
        ("load_wait_s", float("inf")),
        ("load_wait_s", "soon"),
        ("load_wait_s", None),
        ("no_such", 1),
        ("Pool", POOL),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_field(field, value) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"pool": POOL, field: value}, {})
    assert caught.value.field.rpartition(".")[2] == field
    assert "\n" not in str(caught.value)
    assert caught.value.problem
    assert caught.value.remedy


def test_a_name_that_is_no_text_is_refused_too() -> None:
    with pytest.raises(ConfigError):
        read_settings({"pool": POOL, 7: 1}, {})


def test_settings_are_frozen() -> None:
    settings = read_settings({"pool": POOL}, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.pool = "other"


def test_the_page_says_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = page.partition("| setting | default | meaning |")[2].partition("\n\n")[0]
    said = [row.split("|")[1].strip(" `") for row in table.splitlines()[2:]]
    assert said == list(ConnectorSettings.model_fields)
