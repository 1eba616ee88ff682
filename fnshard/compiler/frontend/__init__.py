"""Frontend: `fn` on fake tensors to a pure Program; what cannot be traced is refused by name."""
