from __future__ import annotations

import pytest
import torch

from benchmarks.ranks import RankError, Ranks, largest, take_turns


@pytest.mark.nightly
def test_a_rank_that_fails_is_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.benchmarks.answering"
    with Ranks(module, "any", 2) as able, Ranks(module, "too large", 1) as unable:
        assert able.ask("1") == [10.0, 11.0]
        with pytest.raises(RankError, match="RuntimeError: not on this device"):
            able.ask("fail")
        assert largest("any", able, "fail") is None
        assert "skipped: any, fail: RuntimeError: not on this device" in capfd.readouterr().err
        # It continues with other measurements.
        methods = {"any": able, "too large": unable}
        assert take_turns(methods, "2", 2) == {"any": [21.0, 21.0]}
        with pytest.raises(RankError, match="a rank ended early"):
            able.ask("die")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world_size",
    [1, pytest.param(torch.cuda.device_count() + 1, marks=pytest.mark.real_gpu)],
    ids=["own", "shared"],
)
def test_ranks_have_a_gpu_or_share_it(world_size: int) -> None:
    with Ranks("tests.benchmarks.answering", "sum", world_size, device="cuda") as started:
        assert started.ask("1") == [float(world_size)] * world_size
