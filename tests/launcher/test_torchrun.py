from __future__ import annotations

import os

import pytest

from distmp.errors import ConfigError
from distmp.launcher.torchrun import parse, read


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def test_only_given_options_are_read() -> None:
    words = ["--nnodes", "1:3", "--rdzv_endpoint=h:1", "--rdzv-conf", "a=1, is_host=true"]
    given = read([*words, "--node-rank=0", "--max-restarts=2"])
    assert given.arguments == (*words, "--node-rank=0", "--max-restarts=2")
    assert (given.nnodes, given.node_rank, given.rdzv_endpoint) == ((1, 3), 0, "h:1")
    assert given.rdzv_conf == {"a": "1", "is_host": "true"}
    assert given.ranks is given.local_addr is given.rdzv_id is given.own_rendezvous is None
    # torchrun reads the same arguments.
    assert parse([*given.arguments, "-m", "x"], []).max_restarts == 2


def test_torchrun_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    given = read(["--nproc-per-node=4"])
    assert (given.nnodes, given.node_rank, given.ranks) == ((2, 2), 1, 4)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--standalone"], "standalone"),
        (["--master-addr=h"], "master_addr"),
        (["--rdzv-backend=static"], "rdzv_backend"),
        (["--rdzv-backend=c10d"], None),
    ],
)
def test_rendezvous_options_of_user_are_detected(words: list[str], option: str | None) -> None:
    assert read(words).own_rendezvous == option


@pytest.mark.parametrize("words", [["--rdzv-conf=x"], ["--rdzv-conf", "=1"], ["--nnodes=1:2:3"]])
def test_invalid_values_are_one_message(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read(words)
