"""The attention provider ``torch``."""

from __future__ import annotations

from trivet_torch.paged_attention import PagedAttention


class TorchAttention(PagedAttention):
    """Paged attention by PyTorch's own operations, the reference of every faster provider."""
