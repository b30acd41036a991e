"""The random Hadamard transform, which spreads outliers over blocks of 16 values.

With the orthogonal matrix T, `(T a).T @ (T b)` equals `a.T @ b`, but rounding errors of `T a` and
`T b` are smaller. As in the NVFP4 recipe (arXiv 2509.25149), it is applied to the weight gradient
along the tokens, with one vector of random signs for all layers and steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16
# One random sign for each of 16 positions.
_SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, -1, -1)


def hadamard(matrix: Tensor, transform: Tensor) -> Tensor:
    """Transform each block of 16 rows.

    Args:
        matrix: FP32 [rows, columns]; rows is a multiple of 16.
        transform: FP32 [16, 16], from `random_transform`.
    """
    rows, columns = matrix.shape
    blocks = matrix.view(rows // SIZE, SIZE, columns)
    return (transform @ blocks).view(rows, columns)


def random_transform(device: torch.device) -> Tensor:
    """Return the orthogonal matrix, FP32 [16, 16]; its entries are -1/4 and 1/4."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix * torch.tensor(_SIGNS) / SIZE**0.5).to(device)
