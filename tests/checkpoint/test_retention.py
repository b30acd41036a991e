from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distmp.checkpoint.retention import Retention


def staying(retention: Retention, steps: list[int], size: int = 1) -> list[int]:
    """Save at each of the steps and return the remaining checkpoints."""
    left: list[int] = []
    for step in steps:
        left.append(step)
        going = retention.surplus(dict.fromkeys(left, size))
        assert going == sorted(going)
        left = [other for other in left if other not in going]
    return left


def test_the_last_stay() -> None:
    assert staying(Retention(last=1), [10, 20, 30]) == [30]
    assert staying(Retention(last=2), [10, 20, 30]) == [20, 30]
    assert staying(Retention(last=9), [10, 20, 30]) == [10, 20, 30]


def test_every_nth_step_stays_for_good() -> None:
    steps = list(range(10, 110, 10))
    assert staying(Retention(last=2, every=30), steps) == [30, 60, 90, 100]
    assert staying(Retention(last=1, every=100), steps) == [100]


def test_the_first_at_or_after_every_nth_step_stays_where_none_is_saved_at_it() -> None:
    assert staying(Retention(last=1, every=100), [40, 80, 120, 160, 200, 310, 390]) == [
        120, 200, 310, 390,
    ]  # fmt: skip


def test_what_is_too_large_together_goes_but_never_the_latest() -> None:
    assert staying(Retention(last=4, max_bytes=25), [1, 2, 3, 4], size=10) == [3, 4]
    assert staying(Retention(last=4, max_bytes=5), [1, 2, 3, 4], size=10) == [4]
    assert staying(Retention(last=4, max_bytes=40), [1, 2, 3, 4], size=10) == [1, 2, 3, 4]


def test_the_oldest_go_first() -> None:
    sizes = {1: 5, 2: 50, 3: 5, 4: 5}
    assert Retention(last=4, max_bytes=60).surplus(sizes) == [1]
    assert Retention(last=4, max_bytes=20).surplus(sizes) == [1, 2]


def test_what_stays_for_good_is_not_given_up_for_room() -> None:
    steps = list(range(10, 110, 10))
    assert staying(Retention(last=3, every=30, max_bytes=1), steps) == [30, 60, 90, 100]


@given(
    steps=st.sets(st.integers(0, 200), min_size=1),
    last=st.integers(1, 5),
    every=st.integers(0, 60),
    max_bytes=st.none() | st.integers(0, 100),
    data=st.data(),
)
def test_rules(
    steps: set[int], last: int, every: int, max_bytes: int | None, data: st.DataObject
) -> None:
    sizes = {step: data.draw(st.integers(0, 20)) for step in steps}
    going = set(Retention(last, every, max_bytes).surplus(sizes))
    left = steps - going
    assert going <= steps
    assert max(steps) in left
    for_good = {
        step
        for step in steps
        if every and step >= every and not any(step // every * every <= s < step for s in steps)
    }
    assert for_good <= left
    newest = set(sorted(steps)[-last:])
    if max_bytes is None:
        assert left == for_good | newest
        return
    assert left <= for_good | newest
    total = sum(sizes[step] for step in left)
    if total > max_bytes:
        assert left == for_good | {max(steps)}, "nothing more could go"
    for step in (for_good | newest) - left:
        # Those that were there when it was removed: the oldest go first.
        others = {s for s in for_good | newest if s > step or s in for_good}
        assert sum(sizes[s] for s in others) + sizes[step] > max_bytes, "removed without need"
