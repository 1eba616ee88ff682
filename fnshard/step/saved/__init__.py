"""Saved steps: lowered and compiled steps as files that another process loads."""
