"""What the tokenising job is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.cli.command_spec import CommandSpec, Help
from experiments.configs.checks import configuration, refusal

BROKEN = ("refuse", "skip")


@configuration
class TokenizeConfig:
    """All options.

    Args:
        out: the folder of the shards; new, empty, or one that the same command began.
        files: folders (their *.txt, *.md, *.py and *.jsonl are taken), globs, files; null is Python's
            standard library. A file is one document; a line of *.jsonl is one, its "text".
        tokenizer: a local model directory; null is the byte tokenizer.
        held_out_percent: of the files that are held out, about; by a hash of their names.
        held_out: globs of names; where there are some, they alone decide.
        shard_mb: text of a shard, in 1e6 bytes.
        processes: null is one for each CPU core.
        broken: "refuse" lines of JSONL without a text and bytes that are no UTF-8; or "skip" the lines, and
            replace the bytes.
    """

    out: str
    files: tuple[str, ...] | str | None = None
    tokenizer: str | None = None
    held_out_percent: int = 10
    held_out: tuple[str, ...] | str = ()
    shard_mb: float = 64.0
    processes: int | None = None
    broken: str = "refuse"


def build(values: Mapping[str, Any]) -> TokenizeConfig:
    """The configuration from what Hydra composed.

    Raises:
        ConfigError: unknown keys or values that cannot be; all of them at once.
    """
    known = [f.name for f in dataclasses.fields(TokenizeConfig)]
    problems = [f"{key}: no such key; there are {', '.join(known)}." for key in values if key not in known]
    given = {k: v for k, v in values.items() if k in known}
    if not given.get("out"):
        problems.append("out: name a folder for the shards.")
    for name in ("files", "held_out"):
        value = given.get(name)
        each = [value] if isinstance(value, str) else value
        if isinstance(each, list | tuple) and all(isinstance(one, str) and one for one in each):
            given[name] = tuple(each)
        elif value is not None:
            problems.append(f"{name}={value!r}: expected a name or a list of names, as in {name}=[a,b].")
    config = TokenizeConfig(**{"out": "", **given})
    if not 1 <= config.held_out_percent <= 99:
        problems.append(f"held_out_percent={config.held_out_percent}: must be 1 to 99.")
    if not 1e-6 <= config.shard_mb <= 1e6:
        problems.append(f"shard_mb={config.shard_mb}: must be above 0.")
    if config.processes is not None and config.processes < 1:
        problems.append(f"processes={config.processes}: must be 1 or more.")
    if config.broken not in BROKEN:
        problems.append(f"broken={config.broken!r}: must be one of {', '.join(BROKEN)}.")
    if problems:
        raise refusal(problems)
    return config


HELP = Help(
    about="Text files to shards of tokens, for data=shards of the main job; goes on where it was stopped.",
    options={
        "out": "the folder of the shards",
        "files": "folders, globs and files; null: Python's own library",
        "tokenizer": "a model directory; null: bytes",
        "held_out_percent": "of the files that are held out",
        "shard_mb": "text of a shard, in 1e6 bytes",
        "processes": "null: one for each CPU core",
    },
    examples={
        "python -m experiments.tokenize out=shards": "Python's own library, as bytes",
        "python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'": "texts of your own",
        "python -m experiments.tokenize out=shards tokenizer=DIRECTORY": "with a model's tokenizer",
    },
)
SPEC = CommandSpec("tokenize", TokenizeConfig, HELP, build=build)
