"""The torch side of the core: worker, runner, batch state, KV storage and weight sources."""
