"""Explain: what a configuration comes to on named hardware, without training: numbers, pictures, a report."""
