"""Fixtures of this folder."""

from tuning import data, model  # noqa: F401
