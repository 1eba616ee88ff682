"""Micro-benchmarks, a module each."""
