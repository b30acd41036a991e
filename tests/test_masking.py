from __future__ import annotations

import json
import logging
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.masking import (
    HIDDEN,
    is_masked,
    is_secret,
    mask_record,
    masked,
    masked_text,
    print_message,
)
from distmp.utils.environment_info import relevant

SECRET = "hush-42/+x"
NAMES = (
    *("api_key", "apiKey", "token", "HF_TOKEN", "GITHUB_PAT", "DB_PASSWORD", "MYPASS", "PASSWD"),
    *("auth", "headers", "Authorization", "X-Api-Key", "AWS_SECRET_ACCESS_KEY", "password2"),
    *("client_secret_value", "credentials", "cookie", "signature"),
    *("openai_key", "wandb_key", "hub_token", "ssh_key", "id_token", "apikey", "secret_text_key"),
    *("license_key", "encryption_key", "session_token", "context_api_key", "tokens", "user_keys"),
    *("NEW_TOKEN", "START_TOKEN", "VIDEO_KEY", "INPUT_KEY", "azure_text_key", "new_token"),
    *("azure_openai_context_key", "loader.AUDIO_KEY"),
)


@pytest.mark.parametrize("name", NAMES)
def test_secret_names_are_masked(name: str) -> None:
    assert is_secret(name)
    assert masked({name: SECRET}) == {name: HIDDEN}
    assert masked({"section": [{name: [SECRET, {"x": SECRET}]}]}) == {
        "section": [{name: [HIDDEN, {"x": HIDDEN}]}]
    }


@pytest.mark.parametrize(
    "name",
    [
        *("token_dtype", "num_key_value_heads", "tokenizer", "KeyError", "bypass", "path", "lr"),
        *("precision.phases.until_tokens", "data.options.text_key", "labelKey", "query_keys"),
        *("pad_token", "model.options.max_tokens", "max_new_tokens", "sort_key", "audio_key"),
    ],
)
def test_other_names_are_not_masked(name: str) -> None:
    assert not is_secret(name)
    assert masked({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:hush@host/x", "https://***@host/x"),
        ("https://user:hu/sh@host/x", "https://***@host/x"),
        ("https://hush@host/x", "https://***@host/x"),
        ("https://host/x?token=hush&y=1", "https://host/x?token=***&y=1"),
        ("https://host:8080/a@b s3://bucket/run@1", "https://host:8080/a@b s3://bucket/run@1"),
        ("--x={wandb: {api_key: hush hush, mode: on}}", "--x={wandb: {api_key: ***, mode: on}}"),
        ('{"wandb": {"token" : "hu\\"sh"}}', '{"wandb": {"token" : ***}}'),
        ("--x.auth=[hush, hush]", "--x.auth=***"),
        ("DB_PASS=hush, 'hush", "DB_PASS=***"),
        ("Authorization: Bearer hush", "Authorization: ***"),
        ("invalid header Bearer hushhush", "invalid header Bearer ***"),
        ("{until_tokens: 1e9, policy: bf16}", "{until_tokens: 1e9, policy: bf16}"),
        ("model.max_tokens = 4096: choose one", "model.max_tokens = 4096: choose one"),
        ("data.source = 'my.token:build'", "data.source = 'my.token:build'"),
        ("--to = 'data/tokens': exists", "--to = 'data/tokens': exists"),
        ("--to = 'tokens': exists", "--to = 'tokens': exists"),
        ('INPUT = "my key": holds null', 'INPUT = "my key": holds null'),
        ("cannot read 'a/tokens': x, {'token': hush}", "cannot read 'a/tokens': x, {'token': ***}"),
        ("{'x/token': hush, 'y/token': hush}", "{'x/token': ***, 'y/token': ***}"),
        ("--x={'a/b': 1, 'my token': hush}", "--x={'a/b': 1, 'my token': ***}"),
        ("cannot connect: password='hu sh'; retry", "cannot connect: password=***; retry"),
        (
            "in the backward pass: rank 1; KeyError: 'x'",
            "in the backward pass: rank 1; KeyError: 'x'",
        ),
    ],
)
def test_secrets_in_text_are_masked(text: str, expected: str) -> None:
    assert masked_text(text) == expected
    assert masked_text(expected) == expected
    assert is_masked(expected) == (HIDDEN in expected)


def test_only_numbers_named_password_are_masked() -> None:
    values = {"password": 1234, "key": 7, "token": None, "secret": True, "auth": ""}
    assert masked(values) == values | {"password": HIDDEN}


def test_value_after_secret_option_is_masked() -> None:
    words = ["python", "--api-key", SECRET, "--seed", "1"]
    assert masked(words) == ["python", "--api-key", HIDDEN, "--seed", "1"]
    words = ["--data.source", "tokens", "--seed", "1"]
    assert masked(words) == words
    assert masked((*words, "--auth", SECRET)) == (*words, "--auth", HIDDEN)
    assert masked(("Authorization", SECRET)) == ("Authorization", HIDDEN)
    assert masked(["password", SECRET]) == ["password", HIDDEN]
    assert masked(["--columns", "api_key", "--seed"]) == ["--columns", "api_key", "--seed"]
    assert masked(["query", "key", "value"]) == ["query", "key", "value"]


def test_errors_and_log_messages_are_masked() -> None:
    url = f"s3://me:{SECRET}@bucket"
    error = ConfigError("checkpoint.path", url, f"{url} cannot be read")
    assert str(error) == "checkpoint.path = 's3://***@bucket': s3://***@bucket cannot be read"
    assert error.value == url
    assert SECRET not in str(ConfigError("data.options.password", SECRET, "is wrong"))
    record = logging.LogRecord("distmp", 30, "", 0, "lost %s", (url,), None)
    assert mask_record(record)
    assert record.getMessage() == "lost s3://***@bucket"


def test_message_without_reader_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the watchdog from ending this rank."""
    monkeypatch.setattr(sys, "stderr", Mock(**{"flush.side_effect": BrokenPipeError}))
    print_message("rank 1 hangs")


def test_environment_variables_are_masked() -> None:
    variables = {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_PROXY": f"http://a:{SECRET}@b"}
    secret = dict.fromkeys(("TORCH_HUB_PAT", "NCCL_PASSFILE_PASS", "PET_AUTH"), SECRET)
    assert relevant(variables | secret) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_PROXY": "http://***@b",
    }


def test_masked_values_are_recognized() -> None:
    assert is_masked({"a": [HIDDEN]})
    assert is_masked("s3://***@bucket")
    assert not is_masked({"a": ["b", 1, "*** chapter ***"], "c": None})


# A secret among other settings: the value must not be found in the result.
plain = st.sampled_from(["mode", "path", "num_heads", "url"])
values = st.one_of(st.integers(), st.booleans(), st.none(), st.text("abc ", max_size=4))
secrets = st.sampled_from(NAMES).map(lambda name: {name: SECRET})
urls = st.builds(
    "{}://{}:{}@host/{}".format,
    st.sampled_from(["s3", "https"]),
    st.sampled_from(["", "me"]),
    st.just(SECRET),
    st.text("ab/", max_size=4),
)
lines = st.sampled_from(NAMES).map(lambda name: f"{name}={SECRET}")
nested: st.SearchStrategy[Any] = st.recursive(
    st.one_of(values, secrets, urls, lines),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(plain, inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner.map(str), max_size=2),
    ),
    max_leaves=12,
)


@given(nested)
def test_no_secret_remains_in_settings(value: Any) -> None:
    result = masked(value)
    assert SECRET not in json.dumps(result, default=str)
    assert masked(result) == result


@given(nested)
def test_no_secret_remains_on_a_command_line(value: Any) -> None:
    words = ["python", "--log.tracker-options", json.dumps(value), f"--x={json.dumps(value)}"]
    assert SECRET not in " ".join(masked(words))
