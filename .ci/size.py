"""Counts what a reader of distmp has to hold in mind: `make size`.

A code line has a token that is neither a comment nor part of a docstring. A cycle is a group of
modules that import each other; imports for type checkers and those inside of functions count.
"""

from __future__ import annotations

import ast
import graphlib
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from distmp.config import RunConfig
from distmp.utils.settings import flat

ROOT = Path(__file__).parent.parent
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> int:
    packages: dict[str, list[int]] = defaultdict(list)
    modules = {_name(path): path for path in sorted((ROOT / "distmp").rglob("*.py"))}
    for path in modules.values():
        packages[path.relative_to(ROOT / "distmp").parts[0]].append(len(code_lines(path)))
    for package, lines in sorted(packages.items()):
        print(f"{package:24}{sum(lines):7,} code lines in {len(lines):3} modules")
    functions = sorted(_function_lengths(modules.values()))
    tests = [len(code_lines(path)) for path in (ROOT / "tests").rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    small = sum(len(path.read_text().splitlines()) < 60 for path in modules.values())
    print(f"""
code lines              {sum(map(sum, packages.values())):7,}
modules                 {len(modules):7,}
modules below 60 lines  {small:7,}
configuration keys      {len(flat(asdict(RunConfig()))):7,}
import cycles           {_cycles(modules):7,}
lines of a function     {statistics.median(functions):7,.0f} in the median, \
{functions[len(functions) * 9 // 10]} at the 90th percentile, {functions[-1]} at most
code lines of tests     {sum(tests):7,}
words of pages          {sum(len(page.read_text().split()) for page in pages):7,}""")
    return 0


def code_lines(path: Path) -> set[int]:
    """Return the lines of a file that hold code."""
    source = path.read_text()
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    written = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return written - documented


def _function_lengths(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        code = code_lines(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))


def _cycles(modules: Mapping[str, Path]) -> int:
    """Return the number of groups of modules that import each other."""
    imports = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    found = 0
    while True:
        try:
            graphlib.TopologicalSorter(imports).prepare()
            return found
        except graphlib.CycleError as error:
            found += 1
            cycle = set(error.args[1])
            imports = {
                name: targets - (cycle if name in cycle else set())
                for name, targets in imports.items()
            }


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in modules)
            if node.module in modules and any(name not in modules for name in inner):
                yield node.module


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main())
