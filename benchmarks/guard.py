"""Check that a step has not become slower than by hand: `python -m benchmarks.guard`, in CI.

Compares the processor time of a step with that of torch DDP and of FSDP2 by hand: the shortest of
several alternating turns on two CPU ranks. It fails if the ratio exceeds the recorded one by more
than `MARGIN` in `ATTEMPTS` attempts. The dtype is bf16, or fp32 on CPUs that emulate bf16: there
products take so long that the rest of a step does not count. `python -m benchmarks guard --record`
records the ratios of this kind of CPU; where none is recorded, a step may take as long as by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack

from benchmarks.device import CPU
from benchmarks.loops import BF16
from benchmarks.peers import started
from benchmarks.ranks import take_turns
from benchmarks.report import DIRECTORY, RESULTS, machine, save, sized
from distmp.precision.notation import native_dtypes

PEERS = {"ddp": "torch DDP", "fsdp": "FSDP2 by hand"}
SIZE = sized("22m", "1m")
MARGIN, ATTEMPTS = sized(0.15, 100.0), 3


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="turns of each loop (default: 3)")
    rounds = options.parse_args().rounds
    dtype = "bf16" if BF16 in native_dtypes(CPU) else "fp32"
    name = f"guard-{dtype}-cpu"
    records = os.environ.get(DIRECTORY) == str(RESULTS)
    limits = dict.fromkeys(PEERS, 1.0)
    if (path := RESULTS / f"{name}.json").exists():
        limits |= json.loads(path.read_text())["ratios"]
    found: dict[str, float] = {}
    slower = []
    for strategy, recorded in limits.items():
        for _ in range(ATTEMPTS):
            ratio = found[strategy] = measure(strategy, dtype, rounds)
            print(f"{strategy} {dtype}: {ratio:.3g} of {PEERS[strategy]}, recorded {recorded:.3g}")
            if records or ratio <= recorded + MARGIN:
                break
        else:
            slower.append(strategy)
    save(name, {"machine": machine(CPU), "size": SIZE, "rounds": rounds, "ratios": found})
    if slower:
        print(f"a step has become slower under {', '.join(slower)}", file=sys.stderr)
    return len(slower)


def measure(strategy: str, dtype: str, rounds: int) -> float:
    """Return the processor time of a step relative to that by hand."""
    arguments = argparse.Namespace(ranks=2, device=CPU)
    loops = (f"distmp `{dtype}`", PEERS[strategy])
    with ExitStack() as stack:
        running = {
            loop: stack.enter_context(started(f"{strategy} {dtype}", loop, SIZE, arguments))
            for loop in loops
        }
        seconds = take_turns(running, "processor", rounds)
    ours, theirs = (min(seconds[loop]) for loop in loops)
    return ours / theirs


if __name__ == "__main__":
    sys.exit(main())
