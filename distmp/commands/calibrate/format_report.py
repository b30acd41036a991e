"""Tables and JSON of the errors of matmuls in low-precision formats."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from distmp.commands.calibrate.choice import choose_policy
from distmp.commands.calibrate.formats import FormatCalibration, FormatResult
from distmp.commands.explain.types import group_name
from distmp.diagnosis.product_errors import PRODUCTS, ProductError

WIDTH = 100


def report(found: FormatCalibration, max_error: float) -> list[str]:
    """Return the lines of the tables, and the policy."""
    from rich.console import Console

    # Not to the terminal, so that the text is the same in a file.
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, soft_wrap=False)
    console.print("\n".join(_heading(found)), markup=False)
    for name, result in found.results.items():
        console.print(_table(name, result, max_error))
    for name, reason in found.refused.items():
        console.print(f"{name} cannot be used: {reason}", markup=False)
    assert isinstance(console.file, io.StringIO)
    choice = choose_policy(found, max_error)
    advice = f"policy for errors up to {max_error:g} ({choice.reason}):"
    return [console.file.getvalue().rstrip(), "", advice, choice.text]


def _heading(found: FormatCalibration) -> Iterator[str]:
    ranks = "1 rank" if found.world_size == 1 else f"{found.world_size} ranks"
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    yield (
        f"{steps} on {ranks}, precision {found.wide.name}; the last one is measured "
        f"({found.microbatches} microbatches on each rank)"
    )
    yield (
        "error: norm of the difference from the FP32 product of the same operands, divided by the "
        "norm of that product; the largest of the layers"
    )


def _table(name: str, result: FormatResult, max_error: float) -> Any:
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    table.add_column("layers", overflow="fold")
    for column in ("", *PRODUCTS, "above", "saturated", "underflowed"):
        table.add_column(column, justify="right")
    for group, layers in _groups(result).items():
        table.add_row(*_row(group, layers, result, max_error))
    return table


def _groups(result: FormatResult) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for layer in result.products:
        groups.setdefault(group_name(layer), []).append(layer)
    return groups


def _row(
    group: str, layers: Sequence[str], result: FormatResult, max_error: float
) -> Iterator[str]:
    errors = [result.products[layer] for layer in layers]
    yield group
    yield str(len(layers))
    for index in range(len(PRODUCTS)):
        yield _number(_largest([products[index].error for products in errors]))
    above = sum(
        product.error is not None and not product.error <= max_error
        for products in errors
        for product in products
    )
    yield str(above) if above else "-"
    every = [product for products in errors for product in products]
    yield _share(max(product.saturated for product in every))
    yield _share(max(product.underflowed for product in every))


def _largest(errors: Sequence[float | None]) -> float | None:
    numbers = [error for error in errors if error is not None]
    return max(numbers) if numbers else None


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def _share(value: float) -> str:
    return "0" if value == 0 else "<0.01%" if value < 1e-4 else f"{value:.2%}"


def as_json(found: FormatCalibration, max_error: float) -> dict[str, Any]:
    """Return all measurements and the policy as JSON values."""
    choice = choose_policy(found, max_error)
    return {
        "steps": found.steps,
        "microbatches": found.microbatches,
        "world_size": found.world_size,
        "max_error": max_error,
        "policy": choice.text,
        "reason": choice.reason,
        "above": {layer: _plain(error) for layer, error in choice.above.items()},
        "errors": {
            name: {layer: _products(errors) for layer, errors in result.products.items()}
            for name, result in found.results.items()
        },
        "refused": found.refused,
    }


def _products(products: Sequence[ProductError]) -> dict[str, Any]:
    named = zip(PRODUCTS, products, strict=True)
    return {name: _finite(product._asdict()) for name, product in named}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: float | None) -> float | str | None:
    """JSON has no infinities and no NaN."""
    return value if value is None or math.isfinite(value) else str(value)
