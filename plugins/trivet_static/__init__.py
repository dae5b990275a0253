"""Static batching scheduler: a batch runs to its end before the next one starts."""
