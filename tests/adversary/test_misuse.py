"""Some of the plausible misuse; `make nightly` runs more."""

from __future__ import annotations

import os

import pytest

from tests.adversary.misuse import generate, run

CASES = int(os.environ.get("MISUSE_CASES", "30"))
SEED = int(os.environ.get("MISUSE_SEED", "0"))
# Number of cases per test, so that several tests can run in parallel.
PER_TEST = 30


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_misuse_ends_in_right_numbers_or_one_message(first: int) -> None:
    cases = list(generate(CASES, SEED))[first : first + PER_TEST]
    wrong = [decision for decision in run(cases, timeout=800) if decision.problem]
    if wrong:
        reports = "\n\n".join(map(str, wrong[:3]))
        total = f"{len(wrong)} of {len(cases)} cases failed, MISUSE_SEED={SEED}"
        pytest.fail(f"{reports}\n\n{total}", pytrace=False)
