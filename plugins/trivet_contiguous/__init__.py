"""Contiguous KV cache: every request reserves its memory ahead."""
