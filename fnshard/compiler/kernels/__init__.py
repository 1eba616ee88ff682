"""Kernels: a Program is cut into segments, and each distinct segment is differentiated and compiled."""
