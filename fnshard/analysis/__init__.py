"""Analysis: bytes, FLOPs and seconds of a step before it runs."""
