"""Evaluation of language models on public benchmarks: `python -m experiments.evaluate`."""
