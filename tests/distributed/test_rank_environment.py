from __future__ import annotations

import subprocess
import sys

import pytest

from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError

COMPLETE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_empty_environment_is_single_process() -> None:
    assert RankEnvironment.from_variables({"HOME": "/"}) == RankEnvironment(0, 0, 1, 1)


def test_torchrun_variables_are_read() -> None:
    assert RankEnvironment.from_variables(COMPLETE) == RankEnvironment(
        rank=5, local_rank=1, world_size=8, local_world_size=4
    )


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    assert RankEnvironment.from_variables().rank == 5


@pytest.mark.parametrize("name", COMPLETE)
def test_missing_variable_is_named(name: str) -> None:
    variables = {key: value for key, value in COMPLETE.items() if key != name}
    with pytest.raises(ConfigError, match="is not set although") as error:
        RankEnvironment.from_variables(variables)
    assert error.value.setting == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("RANK", ""),
        ("LOCAL_RANK", "4"),
        ("LOCAL_RANK", "1.0"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "-2"),
        ("LOCAL_WORLD_SIZE", "9"),
    ],
)
def test_invalid_value_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        RankEnvironment.from_variables({**COMPLETE, name: value})
    assert error.value.setting == name
    assert str(error.value.value) == value


@pytest.mark.nightly
def test_rank_environment_agrees_with_torchrun() -> None:
    """Compare with the variables that torchrun sets."""
    program = (
        "import os; from distmp.distributed.rank_environment import RankEnvironment as E;"
        "os.write(1, f'{E.from_variables()}\\n'.encode())"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", "--no-python", sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(finished.stdout.splitlines()) == [
        str(RankEnvironment(rank, rank, 2, 2)) for rank in (0, 1)
    ]
