"""Explain: predict what a configuration takes on named hardware, in numbers and pictures, without
training."""
