"""Check that a step has not become slower than by hand: `python -m benchmarks.guard`, in CI.

Compares the processor time of a step with that of torch DDP and of FSDP2 by hand: the shortest of
several alternating turns on two CPU ranks. It fails if the ratio exceeds the recorded one by more
than `MARGIN` in `ATTEMPTS` attempts. The dtype is bf16, or fp32 on CPUs that emulate bf16: there
products take so long that the rest of a step does not count. `python -m benchmarks guard --record`
records the ratios of this kind of CPU; where none is recorded, a step may take as long as by hand.

It also fails if a step has `MORE_FAULTS` more minor page faults than by hand: then memory returns
to the system and comes back in every step, which costs more where products are fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.device import CPU
from benchmarks.loops import BF16
from benchmarks.peers import started
from benchmarks.ranks import take_turns
from benchmarks.report import RECORDS, RESULTS, machine, save, sized
from distmp.precision.notation import native_dtypes

PEERS = {"ddp": "torch DDP", "fsdp": "FSDP2 by hand"}
SIZE = sized("22m", "1m")
MARGIN, ATTEMPTS = sized(0.15, 100.0), 3
MORE_FAULTS = 100_000


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=2, help="turns of each loop (default: 2)")
    rounds = options.parse_args().rounds
    dtype = "bf16" if BF16 in native_dtypes(CPU) else "fp32"
    name = f"guard-{dtype}-cpu"
    limits = dict.fromkeys(PEERS, 1.0)
    if (path := RESULTS / f"{name}.json").exists():
        limits |= json.loads(path.read_text())["ratios"]
    found: dict[str, Compared] = {}
    slower = []
    for strategy, recorded in limits.items():
        for _ in range(ATTEMPTS):
            ratio, faults = found[strategy] = measure(strategy, dtype, rounds)
            print(
                f"{strategy} {dtype}: {ratio:.3g} of {PEERS[strategy]}, recorded {recorded:.3g}; "
                f"{faults:+,} page faults per step, at most {MORE_FAULTS:+,}"
            )
            if RECORDS or (ratio <= recorded + MARGIN and faults <= MORE_FAULTS):
                break
        else:
            slower.append(strategy)
    ratios = {strategy: compared.ratio for strategy, compared in found.items()}
    faults_by = {strategy: compared.more_faults for strategy, compared in found.items()}
    result: dict[str, Any] = {"machine": machine(CPU), "size": SIZE, "rounds": rounds}
    save(name, {**result, "ratios": ratios, "more_faults": faults_by})
    if slower:
        print(f"a step has become slower under {', '.join(slower)}", file=sys.stderr)
    return len(slower)


class Compared(NamedTuple):
    """A step compared with that by hand.

    Attributes:
        ratio: Its processor time, relative to that by hand.
        more_faults: By how many minor page faults it exceeds that by hand.
    """

    ratio: float
    more_faults: int


def measure(strategy: str, dtype: str, rounds: int) -> Compared:
    """Compare the shortest step, and the one with the fewest page faults, with those by hand."""
    arguments = argparse.Namespace(ranks=2, device=CPU)
    loops = (f"distmp `{dtype}`", PEERS[strategy])
    with ExitStack() as stack:
        running = {
            loop: stack.enter_context(started(f"{strategy} {dtype}", loop, SIZE, arguments))
            for loop in loops
        }
        seconds = take_turns(running, "processor", rounds)
        faults = [max(running[loop].ask("faults")) for loop in loops]
    ours, theirs = (min(seconds[loop]) for loop in loops)
    return Compared(ours / theirs, faults[0] - faults[1])


if __name__ == "__main__":
    sys.exit(main())
