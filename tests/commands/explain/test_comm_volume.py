from __future__ import annotations

import pytest
import torch

from distmp.commands.explain.comm_volume import Sent, traffic

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("all-reduce", 2 * 3 / 4 * 400),
        ("reduce-scatter", 3 / 4 * 400),
        ("all-gather", 3 / 4 * 400),
        ("all-to-all", 3 / 4 * 400),
    ],
)
def test_bytes_of_ring_algorithms(kind: str, nbytes: float) -> None:
    assert Sent(kind, FP32, 100, 4, microbatch=0, updated=False).nbytes == nbytes


def test_the_microbatches_that_were_not_run_are_like_the_second() -> None:
    def gather(microbatch: int) -> Sent:
        return Sent("all-gather", BF16, 10 * (microbatch + 1), 2, microbatch, updated=False)

    decision = Sent("all-reduce", FP64, 6, 2, microbatch=2, updated=False)
    (gathered, agreed) = traffic([gather(0), gather(1), gather(2), decision], 7, shards=True)
    assert (gathered.purpose, gathered.calls, gathered.nbytes) == (
        "parameters",
        7,
        10 + 5 * 20 + 30,
    )
    assert (agreed.purpose, agreed.calls, agreed.nbytes) == ("decision", 1, 48)


def test_what_is_gathered_is_told_apart() -> None:
    before, after = (
        Sent("all-gather", BF16, 8, 2, microbatch=0, updated=updated) for updated in (False, True)
    )
    assert [entry.purpose for entry in traffic([before, after], 1, shards=False)] == [
        "gradients",
        "parameters",
    ]
