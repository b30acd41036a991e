"""`distmp bench precision --config FILE`: compare the precision policies on a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distmp.commands.bench import precision
from distmp.errors import ConfigError, nearest

_BENCHMARKS = {"precision": precision.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named by the first argument; return the exit code.

    Raises:
        ConfigError: If the benchmark does not exist, or the run cannot start.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["--help"], ["-h"]):
        sys.stdout.write(f"usage: distmp bench {'|'.join(_BENCHMARKS)} --config FILE [OPTIONS]\n")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in _BENCHMARKS:
        raise ConfigError("distmp bench", name, nearest(name, _BENCHMARKS))
    return _BENCHMARKS[name](rest)
