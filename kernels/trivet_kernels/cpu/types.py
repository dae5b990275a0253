"""What the compiled kernels call torch's types."""

from __future__ import annotations

import torch

#: the C sources' numbers for element types, as in ``common.h``
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
