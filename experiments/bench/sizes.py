"""The sizes of `conf/model` by name. A bare machine lacks Hydra and a YAML library, so neither is used."""

from __future__ import annotations

import json

from experiments import ROOT
from experiments.lib.decoder import DecoderConfig

MODELS = ROOT / "conf" / "model"


def size_names() -> list[str]:
    """Return the names of all sizes.

    >>> "1b" in size_names()
    True
    """
    return sorted(path.stem for path in MODELS.glob("*.yaml"))


def read_decoder(name: str) -> DecoderConfig:
    """Read the file of a size, which has lines of `key: number` and comments.

    >>> read_decoder("8b").layers
    32
    """
    lines = (MODELS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("#")[0].split(":") for line in lines if line.split("#")[0].strip()]
    sizes = {key.strip(): value for key, value in pairs if key != "defaults"}
    return DecoderConfig(**{key: json.loads(value) for key, value in sizes.items()})
