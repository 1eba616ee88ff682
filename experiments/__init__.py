"""The commands, `python -m experiments.NAME`, and below them what they are made of."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
