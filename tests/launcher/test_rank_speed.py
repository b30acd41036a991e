from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distmp.launcher.rank_speed import RankSpeed, partners, slow_links, slow_ranks, stride


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_partners_are_mutual(machines: int, local_size: int, data: st.DataObject) -> None:
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


def test_slow_is_far_from_the_median_of_the_others() -> None:
    names = [f"rank {rank}" for rank in range(8)]
    speeds = [RankSpeed(1.0 + 0.05 * rank, 4e9, 1e9, True) for rank in range(8)]
    assert slow_ranks(speeds, names) == []
    speeds[5] = speeds[5]._replace(product=2.4)
    speeds[6] = speeds[6]._replace(link=1.6e9)
    product, link = slow_ranks(speeds, names)
    assert product == (
        "rank 5 is slow: a matrix product takes 2.4e+03 ms, 2.1 x the median of the others"
    )
    assert link.startswith("rank 6 is slow: an exchange of data runs at 1.5 GiB/s, 2.5 x slower")
    # A single fast rank makes no other rank slow.
    speeds = [RankSpeed(1.0, 0.0, 1e9, True), *[RankSpeed(3.0, 0.0, 1e9, True)] * 3]
    assert slow_ranks(speeds, names) == []
    assert slow_ranks(speeds[:1], names) == []


def test_links_that_are_slow_for_all_ranks_are_one_warning() -> None:
    fast = RankSpeed(1.0, 4e9, 1e9, True)
    assert slow_links([fast, fast], "cpu") == []
    slow = RankSpeed(1.0, 0.0, 2.0 * 2**20, False)
    (line,) = slow_links([fast, slow], "cpu")
    assert line.startswith("the network is slow: 2.0 MiB/s, so a message of 4.0 MiB takes 2 s")
