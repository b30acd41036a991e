from __future__ import annotations

from pathlib import Path

import pytest

from distmp.distributed.accelerate_launch import check_started, wants_cpu
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.telemetry.records import read_records
from distmp.training.accelerate_launch import overridden_options
from tests.torchrun import TINY, corpus, python, run

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


def test_one_process_in_place_of_several_is_refused() -> None:
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


def test_overridden_options_are_reported() -> None:
    assert list(overridden_options({}, policy("bf16"), "ddp")) == []
    assert list(overridden_options(LAUNCHED, policy("bf16"), "ddp")) == []
    assert (
        list(overridden_options({"ACCELERATE_MIXED_PRECISION": "bf16"}, policy("bf16"), "ddp"))
        == []
    )
    messages = overridden_options(
        {
            "ACCELERATE_MIXED_PRECISION": "fp16",
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        },
        policy("bf16"),
        "fsdp",
    )
    precision, engine, compiler, steps = messages
    assert "mixed precision fp16; precision.policy overrides it with bf16" in precision
    assert "DeepSpeed; strategy overrides it with fsdp" in engine
    assert "INDUCTOR" in compiler
    assert "4 accumulation steps" in steps


def test_cpu() -> None:
    assert wants_cpu({"ACCELERATE_USE_CPU": "True"})
    assert not wants_cpu({"ACCELERATE_USE_CPU": "False"})
    assert not wants_cpu({})


@pytest.mark.nightly
def test_a_run_started_by_accelerate(tmp_path: Path) -> None:
    launcher = python("-m", "accelerate.commands.launch", "--multi-gpu", "--num-processes", "2")
    options = ["--mixed-precision", "bf16", "--main-process-port", "0", "-m", "distmp.train"]
    data = corpus(tmp_path / "corpus")
    done = run(
        [*launcher, *options, *TINY, f"--data.path={data}", "--steps=2", "--run-dir=run"], tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 2 on cpu (gloo), strategy ddp" in done.stdout
    assert done.stdout.count("precision.policy overrides it with fp32") == 1
    assert [record.step for record in read_records(tmp_path / "run" / "steps.jsonl")] == [1, 2]
