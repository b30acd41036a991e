"""Weights that are built deferred are gathered in 8 bits, with the same results as in 16 bits."""

from __future__ import annotations

import pytest

from distmp.commands.calibrate.command import load
from distmp.commands.calibrate.comparison import PolicyResult
from distmp.commands.calibrate.policies import measure
from distmp.distributed.world import World
from distmp.parallel import fsdp
from distmp.parallel.settings import ShardingConfig
from tests.ranks import ranks

RUN = (
    "--model.options={layers: 2, dimension: 32, heads: 2}",
    "--data.sequence-length=16",
    "--batch.global-batch-size=4",
    "--batch.microbatch-size=2",
    "--strategy=fsdp",
)


@ranks(2)
def test_deferred_weights_are_gathered_in_8_bits() -> None:
    world, losses, gathered = World.current("cpu"), [], []

    def gather(*args: object) -> int:
        gathered.append(1)
        return original(*args)  # type: ignore[arg-type]

    original = fsdp.gather_quantized
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "gather_quantized", gather)
        for quantized in (True, False):
            patch.setattr(ShardingConfig, "quantized_gather", quantized)
            config = load([*RUN])
            found = measure(config, world, "fp8", steps=5)
            assert isinstance(found, PolicyResult)
            losses.append(found.losses)
            gathered.append(0)
    assert losses[0] == losses[1]
    assert 1 in gathered
    assert gathered[gathered.index(0) :] == [0, 0]
