from __future__ import annotations

import pytest

from distmp.launcher.preflight.comparison import RankIdentity, differences, differing_variables


def test_variables_that_may_differ() -> None:
    def identity(environment: dict[str, str]) -> RankIdentity:
        return RankIdentity("a", 1, 1, {"torch": "2"}, {"settings": "same"}, environment)

    own = {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "eth0"}
    identities = [
        identity({**own, "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}),
        identity({"LOCAL_RANK": "1", "NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "2"}),
    ]
    assert differences(identities, lambda kind, rank: pytest.fail("digests are equal")) == []
    (warning,) = differing_variables(identities)
    assert warning == 'NCCL_ALGO differs: "Ring" on rank 0 (a), unset on rank 1 (a)'
