from __future__ import annotations

import pytest

from distmp.launcher.preflight.store import who_is_behind


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param(
            {0: ("a", 2), 1: ("a", 2), 2: ("b", 2)},
            "no word from rank 3 on b within 50 s (ranks on a, b have spoken)",
            id="one of a known machine",
        ),
        pytest.param(
            {0: ("a", 2), 1: ("a", 2)},
            "no word from ranks 2-3 on machine 1, host unknown within 50 s",
            id="a whole machine",
        ),
        pytest.param(
            {0: ("a", 2), 1: ("a", 2), 2: ("b", 2), 3: ("b", 2)},
            "all ranks are still to phase 2 after 50 s",
            id="everybody, as with a wrong interface",
        ),
        pytest.param(
            {0: ("a", 3), 1: ("a", 3), 2: ("b", 2), 3: ("b", 3)},
            "rank 2 on b (pid 102) is still to phase 2 after 50 s; the others wait",
            id="one",
        ),
    ],
)
def test_who_is_behind(entries: dict[int, tuple[str, int]], expected: str) -> None:
    told = {
        rank: {"host": host, "count": count, "phase": f"phase {count}", "pid": 100 + rank}
        for rank, (host, count) in entries.items()
    }
    assert who_is_behind(told, 4, 2, 50.0).startswith(expected)
