from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from distmp.commands.explain.trace_steps import Collective, comm_volumes

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
TWO = range(2)


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("all-reduce", 2 * 3 / 4 * 400),
        ("reduce-scatter", 3 / 4 * 400),
        ("all-gather", 3 / 4 * 400),
        ("all-to-all", 3 / 4 * 400),
    ],
)
def test_ring_collectives_have_expected_bytes(kind: str, nbytes: float) -> None:
    assert Collective(kind, FP32, 100, range(4), microbatch=0, updated=False).nbytes == nbytes


def test_omitted_microbatches_count_like_second() -> None:
    def gather(microbatch: int) -> Collective:
        return Collective("all-gather", BF16, 10 * (microbatch + 1), TWO, microbatch, updated=False)

    decision = Collective("all-reduce", FP64, 6, TWO, microbatch=2, updated=False)
    (gathered, agreed) = comm_volumes(
        [gather(0), gather(1), gather(2), decision], 7, 3, 2, shards=True
    )
    assert (gathered.purpose, gathered.calls, gathered.nbytes) == (
        "parameters",
        7,
        10 + 5 * 20 + 30,
    )
    assert (agreed.purpose, agreed.calls, agreed.nbytes) == ("decision", 1, 48)


def test_collectives_of_microbatches_that_were_all_run_count_once() -> None:
    calls = [
        Collective("all-reduce", BF16, 8, TWO, microbatch, updated=False) for microbatch in range(4)
    ]
    assert [entry.calls for entry in comm_volumes(calls, 4, 4, 2, shards=False)] == [4]
    assert [entry.calls for entry in comm_volumes(calls, 16, 4, 2, shards=False)] == [16]


def test_bytes_between_machines_include_all_microbatches() -> None:
    gathers = [
        Collective("all-gather", BF16, 8, range(4), microbatch, updated=False)
        for microbatch in range(3)
    ]
    (gathered,) = comm_volumes(gathers, 7, 3, 2, shards=True)
    assert (gathered.nbytes, gathered.between_machines) == (7 * 12, 7 * 6)
    assert gathered.nbytes - gathered.between_machines == 7 * 6


def test_gathers_of_gradients_and_parameters_are_distinguished() -> None:
    before, after = (
        Collective("all-gather", BF16, 8, TWO, microbatch=0, updated=updated)
        for updated in (False, True)
    )
    assert [entry.purpose for entry in comm_volumes([before, after], 1, 1, 2, shards=False)] == [
        "gradients",
        "parameters",
    ]


def messages(kind: str, ranks: Sequence[int], nbytes: float) -> Iterator[tuple[int, int, float]]:
    """Yield sender, receiver and bytes of each message of a collective, one by one."""
    if kind == "all-to-all":
        for sender in ranks:
            for receiver in ranks:
                if sender != receiver:
                    yield sender, receiver, nbytes / len(ranks)
        return
    # In a ring, every rank passes every part but one on to the next rank, twice to all-reduce.
    passes = 2 if kind == "all-reduce" else 1
    for sender, receiver in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        for _ in range(passes * (len(ranks) - 1)):
            yield sender, receiver, nbytes / len(ranks)


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
@pytest.mark.parametrize(
    ("groups", "local"),
    [
        ([range(8)], 8),  # one machine
        ([range(32)], 8),
        ([range(12)], 3),
        ([range(start, start + 8) for start in range(0, 32, 8)], 8),  # inside machines
        ([range(rail, 32, 8) for rail in range(8)], 8),  # one rank of each machine
        ([range(start, start + 16) for start in range(0, 32, 16)], 8),
        ([range(first, 32, 4) for first in range(4)], 8),
    ],
)
def test_bytes_by_link_agree_with_single_messages(
    kind: str, groups: list[range], local: int
) -> None:
    """On the first machine, if all groups run the collective: per rank, and per network card."""
    sent = between = 0.0
    for group in groups:
        for sender, receiver, nbytes in messages(kind, group, 400):
            if sender < local:
                sent += nbytes
                between += nbytes if receiver >= local else 0.0
    collective = Collective(kind, FP32, 100, groups[0], microbatch=0, updated=False)
    assert collective.nbytes == pytest.approx(sent / local)
    assert collective.bytes_between_machines(local) == pytest.approx(between / local)


def test_bytes_between_8_machines_with_8_gpus() -> None:
    """A flat all-to-all in 16 bits sends more through each network card than a ring in FP32."""
    exchange, ring = (
        Collective(kind, dtype, 1_000_000, range(64), microbatch=0, updated=False)
        for kind, dtype in (("all-to-all", BF16), ("reduce-scatter", FP32))
    )
    assert exchange.bytes_between_machines(8) / 1_000_000 == 1.75
    assert ring.bytes_between_machines(8) / 1_000_000 == pytest.approx(0.5, rel=0.02)
