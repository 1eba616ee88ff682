"""Fixtures that several files of this folder use."""

from wrong_configs import error_of, groups_looked_up_once  # noqa: F401
