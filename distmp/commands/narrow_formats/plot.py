"""Plot of a calibration of narrow formats: the error of every product of every layer."""

from __future__ import annotations

import math
import os
from typing import Any

from distmp.commands.narrow_formats.measure import FormatCalibration, FormatResult
from distmp.diagnosis.product_errors import PRODUCTS
from distmp.utils.files import replacing

_LOWEST, _HIGHEST = 0.01, 1.0
_MOST_LABELS = 60


def draw(found: FormatCalibration, max_error: float, path: str | os.PathLike[str]) -> None:
    """Draw the errors and the cosines of gradients into a PNG, which is replaced atomically.

    Layers are rows. Products above the error are marked with a cross.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(layer for one in found.results.values() for layer in one.products))
    height = 2.5 + 0.2 * min(max(len(layers), 4), _MOST_LABELS)
    count = len(found.results)
    figure = Figure(figsize=(4 + 3.2 * count, height), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for panel, (name, result) in zip(axes, found.results.items(), strict=True):
        image = _draw_format(panel, name, result, layers, max_error)
    every = -(-len(layers) // _MOST_LABELS)
    axes[0].set_yticks(range(0, len(layers), every), layers[::every], fontsize=8)
    figure.colorbar(image, ax=axes, label="relative error of the product", extend="both")
    with replacing(path) as file:
        canvas.print_png(file)


def _draw_format(
    axes: Any, name: str, result: FormatResult, layers: list[str], max_error: float
) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    errors = np.array([_errors(result, layer) for layer in layers])
    image = axes.imshow(
        np.clip(errors, _LOWEST, _HIGHEST),
        aspect="auto",
        interpolation="none",
        cmap="viridis",
        norm=LogNorm(_LOWEST, _HIGHEST),
    )
    rows, columns = np.nonzero(errors > max_error)
    axes.plot(columns, rows, linestyle="none", marker="x", color="#D55E00")
    axes.set_xticks(range(len(PRODUCTS)), PRODUCTS)
    axes.set_title(f"{name}\ncosine of the gradient {result.gradient.cosine:.4f}", fontsize=10)
    return image


def _errors(result: FormatResult, layer: str) -> list[float]:
    """Return the errors to draw; an error that is not a number is drawn as infinite."""
    if layer not in result.products:
        return [math.nan] * len(PRODUCTS)
    errors = [product.error for product in result.products[layer]]
    return [
        math.nan if error is None else math.inf if math.isnan(error) else error for error in errors
    ]
