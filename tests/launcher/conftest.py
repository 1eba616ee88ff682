"""Fixtures of this folder."""

from launched import forked  # noqa: F401
