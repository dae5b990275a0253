"""A cache tier: evicted blocks go to host memory and on to disk, and come back on a later prefix hit."""
