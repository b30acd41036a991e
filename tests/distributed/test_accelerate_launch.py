from __future__ import annotations

from pathlib import Path

import pytest

from distmp.distributed.rank_environment import RankEnvironment, check_started, wants_cpu
from distmp.errors import ConfigError
from distmp.telemetry.records import read_records
from tests.torchrun import python, run, tiny

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


def test_one_process_instead_of_several_is_refused() -> None:
    alone = {**LAUNCHED, "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ConfigError, match="accelerate launch --multi-gpu"):
        check_started(alone)
    with pytest.raises(ConfigError, match="started one"):
        RankEnvironment.from_variables(alone)
    assert RankEnvironment.from_variables(LAUNCHED) == RankEnvironment()
    # Not launched by accelerate.
    assert RankEnvironment.from_variables({"MASTER_ADDR": "127.0.0.1"}) == RankEnvironment()
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert RankEnvironment.from_variables({**alone, **ranks}).rank == 1


def test_cpu_setting_of_accelerate_is_read() -> None:
    assert wants_cpu({"ACCELERATE_USE_CPU": "True"})
    assert not wants_cpu({"ACCELERATE_USE_CPU": "False"})
    assert not wants_cpu({})


@pytest.mark.nightly
def test_accelerate_launch_starts_a_run(tmp_path: Path) -> None:
    launcher = python("-m", "accelerate.commands.launch", "--multi-gpu", "--num-processes", "2")
    options = ["--mixed-precision", "bf16", "--main-process-port", "0", "-m", "distmp.train"]
    done = run([*launcher, *options, *tiny(tmp_path, "--steps=2")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 2 on cpu (gloo), strategy ddp" in done.stdout
    assert [record.step for record in read_records(tmp_path / "run" / "steps.jsonl")] == [1, 2]
