from __future__ import annotations

import pytest

from benchmarks.ranks import RankError, Ranks, largest, take_turns


def test_a_rank_that_cannot_do_something_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.benchmarks.answering"
    with Ranks(module, "any", 2) as able, Ranks(module, "too large", 1) as unable:
        assert able.ask("1") == [10.0, 11.0]
        with pytest.raises(RankError, match="RuntimeError: not on this device"):
            able.ask("fail")
        assert largest("any", able, "fail") is None
        assert "left out: any, fail: RuntimeError: not on this device" in capfd.readouterr().err
        # It goes on with what it can do.
        ways = {"any": able, "too large": unable}
        assert take_turns(ways, "2", 2) == {"any": [21.0, 21.0]}
        with pytest.raises(RankError, match="a rank ended early"):
            able.ask("die")
