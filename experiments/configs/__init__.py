"""Configurations as frozen dataclasses, and what they come to on this machine."""
