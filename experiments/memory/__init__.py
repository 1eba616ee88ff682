"""What memory costs and what saves it, measured and on paper. `python -m experiments.memory`; see README.md."""
