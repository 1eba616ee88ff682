"""Worked examples: training scripts of one page each, from a parameter tree, from a module, on two ranks."""
