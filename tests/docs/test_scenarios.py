"""The tables of faults are those that `python -m tests.soak.scenarios` measured."""

from __future__ import annotations

import pytest

from distmp.distributed.limits import ARRIVAL_SECONDS, LINK_SECONDS, REJOIN_SECONDS
from tests.soak.scenarios import DOCUMENTS, SCENARIOS, kept, table, with_tables


@pytest.mark.parametrize("name", DOCUMENTS)
def test_scenario_tables_agree_with_measurements(name: str) -> None:
    page = DOCUMENTS[name].read_text()
    rows = [outcome for outcome in kept() if outcome.table == name]
    assert table(rows) in page
    assert with_tables(page, kept()) == page


def test_every_scenario_is_measured() -> None:
    measured = [(outcome.table, outcome.what, outcome.options) for outcome in kept()]
    assert measured == [(one.table, one.what, one.options) for one in SCENARIOS]


def test_run_continues_or_ends_within_two_minutes() -> None:
    for outcome in kept():
        assert outcome.continues or (outcome.ended is not None and outcome.ended < 120), outcome
        if outcome.options and "first host" not in outcome.what:
            assert outcome.continues, outcome


def test_time_limits_are_ordered() -> None:
    """See `distmp.distributed.limits`; TCP retransmits 51 and 102 s after a first loss."""
    assert 51 < LINK_SECONDS < ARRIVAL_SECONDS
    assert 102 + 5 < REJOIN_SECONDS < 120
