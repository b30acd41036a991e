"""`distmp bench precision --config FILE`: what each precision policy would do to this run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distmp.commands.bench import precision
from distmp.errors import ConfigError, nearest

_BENCHMARKS = {"precision": precision.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first word names; return the exit code.

    Raises:
        ConfigError: If there is none of that name, or the run could not start.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["--help"], ["-h"]):
        sys.stdout.write(f"usage: distmp bench {'|'.join(_BENCHMARKS)} --config FILE [OPTIONS]\n")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in _BENCHMARKS:
        raise ConfigError("distmp bench", name, nearest(name, _BENCHMARKS))
    return _BENCHMARKS[name](rest)
