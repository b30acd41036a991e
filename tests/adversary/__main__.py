"""Runs random cases: `python -m tests.adversary --cases 5000`, or replays a case from its JSON."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence

from tests.adversary.cases import Case, dumps, generate, legal, loads
from tests.adversary.run import run_cases
from tests.adversary.shrink import kinds, shrink

# Frequency of each number of ranks, out of 20.
SHARES = {1: 6, 2: 9, 4: 5}


def main() -> int:
    options = _options()
    if options.replay:
        return _replay(loads(options.replay))
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"{options.cases} cases, --seed {seed}")
    failures = 0
    for cases in _batches(seed, options.cases, options.batch):
        begun = time.monotonic()
        decisions = run_cases(cases)
        seconds = time.monotonic() - begun
        print(f"{len(cases)} cases on {cases[0].world_size} ranks in {seconds:.0f} s", flush=True)
        for case, complaints in zip(cases, decisions, strict=True):
            if complaints:
                failures += 1
                print(describe(case, complaints, options.shrink), flush=True)
                if failures >= options.failures:
                    print(f"stopped after {failures} failures, --seed {seed}")
                    return 1
    print(f"{failures} failures, --seed {seed}")
    return int(failures > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="how many cases to try")
    parser.add_argument("--seed", type=int, help="of the cases; by default another one every time")
    parser.add_argument("--replay", metavar="JSON", help="run this case alone")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds to make a failing case smaller"
    )
    parser.add_argument("--failures", type=int, default=20, help="stop after so many")
    parser.add_argument("--batch", type=int, default=100, help="cases for the same processes")
    return parser.parse_args()


def _replay(case: Case) -> int:
    complaints = run_cases([legal(case)])[0]
    print("\n".join(complaints) or "nothing to complain about")
    return int(bool(complaints))


def _batches(seed: int, count: int, size: int) -> Iterator[list[Case]]:
    """Yield all cases in batches that share processes, alternating the number of ranks."""
    by_ranks = [
        [cases[first : first + size] for first in range(0, len(cases), size)]
        for cases in draw(seed, count).values()
    ]
    for turn in itertools.zip_longest(*by_ranks):
        yield from filter(None, turn)


def draw(seed: int, count: int) -> dict[int, list[Case]]:
    """Return this number of cases, by their number of ranks."""
    total = sum(SHARES.values())
    bounds = [round(count * share / total) for share in SHARES.values()]
    bounds[0] += count - sum(bounds)
    return {
        size: [generate(seed, index, size) for index in range(number)]
        for size, number in zip(SHARES, bounds, strict=True)
        if number
    }


def describe(case: Case, complaints: Sequence[str], seconds: float = 60.0) -> str:
    """Print the failure of the smallest case found, and how to replay it."""
    smallest, found = shrink(case, complaints, run_cases, seconds)
    return "\n".join(
        [
            f"FAILED ({', '.join(sorted(kinds(complaints)))})",
            *(f"  {line}" for complaint in found[:8] for line in complaint.splitlines()),
            f"  seed {case.seed}; shrunk from a case of {len(dumps(case))} characters",
            f"  python -m tests.adversary --replay '{dumps(smallest)}'",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
