"""Kernels: they are made of a Program, which is cut into segments, differentiated, and compiled."""
