"""The fake model with hidden states as the torch runner pools them."""

from __future__ import annotations

from typing import Any

import torch

from trivet.testing.fake_model import FakeModel


class TensorModel(FakeModel):
    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        output.hidden = torch.from_numpy(output.hidden)
        return output
