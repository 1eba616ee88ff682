"""Fixtures of this folder."""

from weights import nothing_is_left_open  # noqa: F401
