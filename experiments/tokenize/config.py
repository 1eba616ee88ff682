"""The options of the tokenising job."""

from __future__ import annotations

from dataclasses import replace

from experiments.cli.command_spec import CommandSpec
from experiments.configs.checks import configuration, out_of_range, refusal

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


def complete(config: TokenizeConfig) -> TokenizeConfig:
    """Check the values; one name is a list of one."""
    named = {n: (v,) if isinstance(v := getattr(config, n), str) else v for n in ("files", "held_out")}
    problems = [] if config.out else ["out: name a folder for the shards."]
    problems += [
        f"{name}={list(value)}: expected a name or a list of names, as in {name}=[a,b]."
        for name, value in named.items()
        if value is not None and not all(value or (name == "held_out",))
    ]
    if not 1 <= config.held_out_percent <= 99:
        problems.append(f"held_out_percent={config.held_out_percent}: must be 1 to 99.")
    if not 1e-6 <= config.shard_mb <= 1e6:
        problems.append(f"shard_mb={config.shard_mb}: must be above 0.")
    if problems := [*problems, *out_of_range(config, {"broken": BROKEN}, {"processes": 1})]:
        raise refusal(problems)
    return replace(config, **named)


SPEC = CommandSpec(
    "tokenize",
    TokenizeConfig,
    "Text files to shards of tokens, for data=shards of the main job; goes on where it was stopped.",
    {
        "python -m experiments.tokenize out=shards": "Python's own library, as bytes",
        "python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'": "texts of your own",
        "python -m experiments.tokenize out=shards tokenizer=DIRECTORY": "with a model's tokenizer",
    },
    complete=complete,
)
