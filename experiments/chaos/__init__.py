"""The kill campaign: `python -m experiments.chaos`."""
