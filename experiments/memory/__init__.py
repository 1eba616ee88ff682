"""What saves memory, and how much, measured and on paper. `python -m experiments.memory`; see README.md."""
