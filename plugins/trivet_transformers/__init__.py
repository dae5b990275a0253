"""Any decoder-only model of transformers through its attention interface."""
