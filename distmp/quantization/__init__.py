"""Matrix products with operands of 4 and 8 bits: formats, scales, and the layers that use them."""
