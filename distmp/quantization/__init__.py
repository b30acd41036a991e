"""Matrix products with operands of 4 and 8 bits: formats, scales, and the layers that use them."""

from distmp.quantization.layers import NarrowLayers, narrow_layers
from distmp.quantization.linear import NarrowState, ProductFormats, narrow_linear

__all__ = ["NarrowLayers", "NarrowState", "ProductFormats", "narrow_layers", "narrow_linear"]
