"""The options of `python -m experiments.tokenize`, which writes texts as shards of tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from experiments.lib.checks import configuration
from experiments.lib.compose import Command


def _as_list(value: Any) -> Any:
    """Return a single name as a list, so that `files=texts` and `files=[texts]` are the same."""
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_list)]


@configuration
class TokenizeConfig:
    """The whole configuration of the tokenising job.

    Args:
        out: the folder of the shards; new, empty, or one that the same command began.
        files: folders (their *.txt, *.md, *.py and *.jsonl are taken), globs, files; null is Python's
            standard library. A file is one document. In a file *.jsonl each line is one, its "text".
        tokenizer: a local model directory; null is the byte tokenizer.
        held_out_percent: how many of a hundred files are held out, about. A hash of its name decides of each.
        held_out: globs of the names of files that are held out; if there are any, they alone decide.
        shard_mb: the text of a shard, in 1e6 bytes.
        processes: the number of processes that tokenise; null is one for each CPU core.
        broken: "refuse" lines of JSONL without a text and bytes that are no UTF-8; or "skip" the lines, and
            replace the bytes.
    """

    out: Name
    files: Annotated[Names, Field(min_length=1)] | None = None
    tokenizer: str | None = None
    held_out_percent: Annotated[int, Field(ge=1, le=99)] = 10
    held_out: Names = ()
    shard_mb: PositiveFloat = 64.0
    processes: PositiveInt | None = None
    broken: Literal["refuse", "skip"] = "refuse"


COMMAND = Command(
    "tokenize",
    TokenizeConfig,
    "Write text files as shards of tokens, which data=shards of the main job reads. The same command again "
    "goes on where it was stopped.",
    {
        "python -m experiments.tokenize out=shards": "Python's own library, as bytes",
        "python -m experiments.tokenize out=shards 'files=[texts, more/*.jsonl]'": "texts of your own",
        "python -m experiments.tokenize out=shards tokenizer=DIRECTORY": "with a model's tokenizer",
    },
)
