"""Collectives over gloo and NCCL, over shared memory, between simulated ranks, and for a single rank."""
