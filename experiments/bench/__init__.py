"""The bench: a registry of cases, each of which measures one thing. `python -m experiments.bench case=...`"""
