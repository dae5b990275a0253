"""Common decoder families with fused and packed weights: the fast path."""
