"""Paged KV cache: fixed-size blocks and block tables."""
