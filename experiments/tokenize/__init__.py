"""Text to shards of tokens: `python -m experiments.tokenize`."""
