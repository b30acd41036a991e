"""Warns about layers without low-precision matmuls, although the policy asks for them."""

from __future__ import annotations

from distmp.engine.narrow_products import MatmulStatistics
from distmp.errors import listed
from distmp.quantization import NarrowLayers


class CallCheck:
    """Finds, once, the low-precision layers that no rank called in the first step.

    Args:
        layers: The layers with low-precision matmuls; None: there are none.
    """

    def __init__(self, layers: NarrowLayers | None) -> None:
        self._layers = layers

    def warning(self, statistics: MatmulStatistics | None) -> str | None:
        """Return the warning about a completed step; None if there is none, or after the first.

        Args:
            statistics: Those of the step, over all ranks.
        """
        if self._layers is None or statistics is None:
            return None
        elements = statistics.read()[..., -1].sum(1).tolist()
        if not any(elements):  # all matmuls have full precision in this step
            return None
        layers, self._layers = self._layers, None
        names = [
            repr(name)
            for name, count in zip(statistics.layers, elements, strict=True)
            if count == 0 and _counts_calls(layers, name)
        ]
        if not names:
            return None
        return (
            f"no rank called the linear layers {listed(names)} in the first step; if the model "
            "uses their weights without calling them, their products have the compute dtype, and "
            "not the formats of the policy: call the layers, or list them in precision.policy.hp"
        )


def _counts_calls(layers: NarrowLayers, name: str) -> bool:
    """Return whether every call of a layer adds statistics.

    Backward skips the gradients of inputs and weights that need none, also in called layers.
    """
    formats = layers.states[name].formats
    return bool(formats.forward or (formats.wgrad and layers.modules[name].weight.requires_grad))
