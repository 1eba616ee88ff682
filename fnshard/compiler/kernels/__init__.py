"""Kernels: a Program cut into segments, differentiated, and compiled."""
