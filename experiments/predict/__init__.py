"""Predicted against measured step times: `python -m experiments.predict`; what was found is in README.md."""
