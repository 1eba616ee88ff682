"""Collectives: gloo and NCCL, shared memory, simulated ranks, and none at all."""
