"""Trace `fn` on fake tensors into a pure Program; what cannot be traced is refused by name."""
