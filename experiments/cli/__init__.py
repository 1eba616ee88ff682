"""The command line: what it may say, checked before Hydra composes and torch loads."""
