"""A rank of a benchmark, used by test_ranks.py."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.ranks import serve
from distmp.distributed.world import World


def make(method: str, world: World) -> Callable[[str], float]:
    if method == "too large":
        raise RuntimeError("out of memory")

    def answer(order: str) -> float:
        if order == "fail":
            raise RuntimeError("not on this device")
        if order == "die":
            sys.exit(3)
        if method == "sum":
            total = torch.ones((), device=world.device)
            dist.all_reduce(total)
            return total.item()
        return 10 * float(order) + world.rank

    return answer


if __name__ == "__main__":
    sys.exit(serve(make))
