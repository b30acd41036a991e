from __future__ import annotations

import pytest

from distmp.launcher.network import MTU_ADVICE
from distmp.launcher.preflight.store import EXCHANGE, describe_late_ranks


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param(
            {0: ("a", 2), 1: ("a", 2), 2: ("b", 2)},
            "no message from rank 3 on b within 50 s (received: ranks on a, b)",
            id="one of a known machine",
        ),
        pytest.param(
            {0: ("a", 2), 1: ("a", 2)},
            "no message from ranks 2-3 on machine 1, host unknown within 50 s",
            id="all of a machine",
        ),
        pytest.param(
            {0: ("a", 2), 1: ("a", 2), 2: ("b", 2), 3: ("b", 2)},
            "all ranks are still in phase 2 after 50 s",
            id="all, for example with a wrong interface",
        ),
        pytest.param(
            {0: ("a", 3), 1: ("a", 3), 2: ("b", 2), 3: ("b", 3)},
            "rank 2 on b (pid 102) is still in phase 2 after 50 s; the other ranks are waiting",
            id="one",
        ),
    ],
)
def test_describe_late_ranks(entries: dict[int, tuple[str, int]], expected: str) -> None:
    values = {
        rank: {"host": host, "count": count, "phase": f"in phase {count}", "pid": 100 + rank}
        for rank, (host, count) in entries.items()
    }
    assert describe_late_ranks(values, 4, 2, 50.0).startswith(expected)


def test_ranks_that_connect_and_cannot_send_data_hint_at_the_mtu() -> None:
    entry = {"host": "a", "count": 5, "phase": EXCHANGE, "pid": 1}
    message = describe_late_ranks({0: entry, 1: {**entry, "host": "b"}}, 2, 1, 50.0)
    assert "rank 0 on a (pid 1), rank 1 on b (pid 1) are still exchanging data" in message
    assert message.endswith(MTU_ADVICE)
