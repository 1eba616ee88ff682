"""A decoder's sizes, and those of `conf/model` by name: read without Hydra or a YAML library, which a bare
machine lacks."""

from __future__ import annotations

import json
import math

from experiments import ROOT
from experiments.configs.checks import configuration

MODELS = ROOT / "conf" / "model"


@configuration
class DecoderConfig:
    """Sizes of a `Decoder`.

    Args:
        width: D, features per position.
        layers: number of blocks.
        heads: H; D / H is the head size and must be even (rotary turns pairs).
        kv_heads: G; divides H. G = H is multi-head, G = 1 multi-query attention.
        context: longest T the model is trained for.
        vocab: V; 256 for bytes.
        mlp: M; 0 means 8/3 D, rounded up to a multiple of 32.
        tied: the output projection is the embedding.
        theta: base of the rotary wavelengths.

    >>> DecoderConfig(width=64, layers=2, heads=4, kv_heads=2, context=128).hidden
    192
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    vocab: int = 256
    mlp: int = 0
    tied: bool = False
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1.")
        if self.mlp < 0:
            raise ValueError(f"model.mlp={self.mlp}: must be 0 (8/3 of the width) or more.")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"model.theta={self.theta}: must be a positive number.")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model.width={self.width} and model.heads={self.heads}: the head size, width / heads, "
                "must be a whole even number."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} and model.kv_heads={self.kv_heads}: kv_heads must divide heads."
            )

    @property
    def head(self) -> int:
        """K, features per head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """M, features inside the MLP."""
        return self.mlp or math.ceil(8 * self.width / 3 / 32) * 32

    @property
    def parameters(self) -> int:
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + self.width + self.vocab * self.width * (1 if self.tied else 2)

    def flops_per_token(self, length: int = 0) -> int:
        """Model FLOPs of a token, forward and backward: 6 N + 6 L T D; see `fnshard.analysis.hardware.mfu`.

        N counts the parameters of matrices that multiply, the head among them and an embedding that is only
        looked up not. Scores and their weighted sum read T / 2 positions on average (PaLM, appendix B,
        halved for the causal mask).

        Args:
            length: T; 0 is `context`.
        """
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        matrices = self.layers * (attention + 3 * self.width * self.hidden) + self.vocab * self.width
        return 6 * matrices + 6 * self.layers * (length or self.context) * self.width


def names() -> list[str]:
    """What there is.

    >>> "1b" in names()
    True
    """
    return sorted(path.stem for path in MODELS.glob("*.yaml"))


def decoder(name: str) -> DecoderConfig:
    """The file of that name: lines of `key: number`, and comments.

    >>> decoder("8b").layers
    32
    """
    lines = (MODELS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("#")[0].split(":") for line in lines if line.split("#")[0].strip()]
    sizes = {key.strip(): value for key, value in pairs if key != "defaults"}
    return DecoderConfig(**{key: json.loads(value) for key, value in sizes.items()})
