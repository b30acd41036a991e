"""Matrix products with operands of 4 and 8 bits: formats, scales, and the layers that use them."""

from distmp.quantization.layers import LowPrecisionLayers, low_precision_layers
from distmp.quantization.linear import LowPrecisionState, ProductFormats, low_precision_linear

__all__ = [
    "LowPrecisionLayers",
    "LowPrecisionState",
    "ProductFormats",
    "low_precision_layers",
    "low_precision_linear",
]
