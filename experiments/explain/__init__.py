"""Explain: predict what a configuration takes on named hardware, without training."""
