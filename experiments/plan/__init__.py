"""Plan: the fastest way to train a model on so many devices, and the fewest devices for so many days."""
