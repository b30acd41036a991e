from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distmp.training.preflight import RankSpeed, partners, slow_ranks, stride


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_exchange_partners_are_mutual(machines: int, local_size: int, data: st.DataObject) -> None:
    world_size = machines * local_size
    if data.draw(st.booleans(), label="uniform machines") or machines < 3:
        sizes = [local_size] * world_size
    else:
        sizes = [local_size] * (world_size - 1) + [local_size + 1]
    step = stride(sizes)
    rounds = [partners(rank, world_size, step) for rank in range(world_size)]
    assert len({len(own) for own in rounds}) == 1, "ranks would wait for each other"
    for rank, own in enumerate(rounds):
        for number, partner in enumerate(own):
            assert partner is None or (partner != rank and rounds[partner][number] == rank)
        neighbors = {partner for partner in own if partner is not None}
        # Both neighbors, if there are two.
        assert len(neighbors) == min(2, world_size // step - 1)
        if machines > 1 and len(set(sizes)) == 1:
            assert not any(partner // local_size == rank // local_size for partner in neighbors)


def test_slow_ranks_deviate_from_median_of_others() -> None:
    names = [f"rank {rank}" for rank in range(8)]
    speeds = [RankSpeed(4e9 + 1e8 * rank, 1e9) for rank in range(8)]
    assert slow_ranks(speeds, names) == []
    speeds[6] = speeds[6]._replace(link=1.7e9)
    (line,) = slow_ranks(speeds, names)
    assert line.startswith("rank 6 is slow: an exchange of data runs at 1.6 GiB/s, 2.5 x slower")
    # A single fast rank makes no other rank slow, and ranks without neighbors are not compared.
    speeds = [RankSpeed(9e9, 1e9), *[RankSpeed(1e9, 1e9)] * 3, RankSpeed(0.0, 1e9)]
    assert slow_ranks(speeds, names) == []
    assert slow_ranks(speeds[:1], names) == []
