"""Some of the odd inputs; `make nightly` tries more."""

from __future__ import annotations

import os

import pytest

from tests.adversary.inputs import run

CASES = int(os.environ.get("INPUTS_CASES", "10"))
SEED = int(os.environ.get("INPUTS_SEED", "0"))
# Number of cases per test, so that several tests can run in parallel.
PER_TEST = 50


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_odd_inputs_end_right_or_with_one_message(first: int) -> None:
    verdicts = run(range(first, min(first + PER_TEST, CASES)), SEED)
    wrong = [verdict for verdict in verdicts if verdict.problem]
    if wrong:
        reports = "\n\n".join(map(str, wrong[:3]))
        total = f"{len(wrong)} of {len(verdicts)} cases failed, INPUTS_SEED={SEED}"
        pytest.fail(f"{reports}\n\n{total}", pytrace=False)
