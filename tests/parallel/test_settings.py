from __future__ import annotations

from typing import Any

import pytest

from distmp.config import load
from distmp.errors import ConfigError
from distmp.parallel.fsdp_setup import shard_size
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from tests.parallel.test_init import world


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sharding.accumulate unshard", "sharding.accumulate = 'unshard'"),
        (
            "--sharding.accumulate hybrid --strategy fsdp",
            "applies only to hsdp, but",
        ),
        (
            "--sharding.accumulate sharded --strategy ddp",
            "applies only to fsdp and hsdp, but",
        ),
        ("--sharding.shard-size 2 --strategy fsdp", "sharding.shard_size = 2: applies only to"),
        ("--sharding.shard-size 0 --strategy hsdp", "sharding.shard_size = 0: use 1 or more"),
        ("--sharding.no-reshard-after-forward --strategy ddp", "sharding.reshard_after_forward"),
        ("--compile block", "compile = 'block'"),
        ("--activation-checkpointing all", "activation_checkpointing = 'all': must be one of"),
    ],
)
def test_unsupported_settings_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments.split())
    assert message in str(caught.value)


def test_all_settings_reach_the_strategy() -> None:
    arguments = (
        "--strategy hsdp --sharding.shard-size 2 --sharding.wrap Block norm --compile blocks"
    )
    config = load(arguments.split())
    expected = ShardingConfig(shard_size=2, wrap=("Block", "norm"))
    assert config.parallel(3) == ParallelConfig(expected, compile="blocks", microbatches=3)


@pytest.mark.parametrize("settings", [{"compile": "all"}, {"activation_checkpointing": True}])
def test_choices_are_checked_without_a_file_too(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be one of 'none', 'blocks'"):
        ParallelConfig(**settings)
    with pytest.raises(ConfigError, match="a pattern needs"):
        ShardingConfig(wrap=("",))


def test_a_shard_group_divides_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shard_size(ShardingConfig(), world(8)) == 4
    assert shard_size(ShardingConfig(shard_size=2), world(8)) == 2
    with pytest.raises(ConfigError, match="= 3: does not divide the 8 ranks; use one of 1, 2, 4"):
        shard_size(ShardingConfig(shard_size=3), world(8))
    with pytest.raises(ConfigError, match="= 4: does not divide the 6 ranks"):
        shard_size(ShardingConfig(), world(6))
