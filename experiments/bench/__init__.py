"""The bench: fnshard beside what torch itself ships, in one launch. `python -m experiments.bench`."""
