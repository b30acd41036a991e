from __future__ import annotations

import pytest
import torch

from distmp.commands.explain.comm_volume import Collective, comm_volumes

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
    assert Collective(kind, FP32, 100, 4, microbatch=0, updated=False).nbytes == nbytes


def test_microbatches_that_were_not_run_count_like_the_second() -> None:
    def gather(microbatch: int) -> Collective:
        return Collective("all-gather", BF16, 10 * (microbatch + 1), 2, microbatch, updated=False)

    decision = Collective("all-reduce", FP64, 6, 2, microbatch=2, updated=False)
    (gathered, agreed) = comm_volumes([gather(0), gather(1), gather(2), decision], 7, shards=True)
    assert (gathered.purpose, gathered.calls, gathered.nbytes) == (
        "parameters",
        7,
        10 + 5 * 20 + 30,
    )
    assert (agreed.purpose, agreed.calls, agreed.nbytes) == ("decision", 1, 48)


def test_gathered_gradients_and_parameters_are_distinguished() -> None:
    before, after = (
        Collective("all-gather", BF16, 8, 2, microbatch=0, updated=updated)
        for updated in (False, True)
    )
    assert [entry.purpose for entry in comm_volumes([before, after], 1, shards=False)] == [
        "gradients",
        "parameters",
    ]
