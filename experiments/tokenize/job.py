"""The tokenising job: text files to two folders of shards, one of them held out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.crew import CrewError, work
from experiments.data.files import first_few
from experiments.data.shardfolder import HEADER, Shard, Shards, open_shards, write_header
from experiments.data.shardwriter import (
    PARTIAL,
    SHOWN,
    Advance,
    Made,
    Recipe,
    TextSpan,
    dtype_of,
    spans_of,
    write_shard,
)
from experiments.data.text_files import TextFile, find, split
from experiments.data.tokenizer import SETTINGS, Tokenizer, byte_tokenizer, load_tokenizer, save_tokenizer
from experiments.data.writer import WriteProgress
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.journal import NAME, Journal, alone, refuse_others
from fnshard.errors import report

FORMAT = 1
TOKENIZER = "tokenizer"  # the folder of its files
SIDES = ("held_out", "train")


@dataclass(frozen=True)
class ShardTask:
    """One shard: of which side, its number there, and its text."""

    side: str
    number: int
    spans: tuple[TextSpan, ...]

    @property
    def file(self) -> str:
        return f"{self.number:06d}.bin"

    @property
    def bytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


def tokenize(config: TokenizeConfig) -> list[Shards]:
    """Write `out/train` and `out/held_out`; the same bytes with any number of processes.

    A job that was killed goes on where it was, when it is started again as before: shards that were written
    are kept.

    Returns:
        The shards of `SIDES`.

    Raises:
        ConfigError: no text, text that is refused, a tokenizer that is none, a folder of something else, or
            one that cannot be written to.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else byte_tokenizer()
    sides = split(find(config.files), config.held_out_percent, config.held_out)
    identity = _identity(config, tokenizer, sides)
    out = Path(config.out)
    try:
        _check_free(out)
        for side in SIDES:
            (out / side).mkdir(parents=True, exist_ok=True)
        with alone(out):
            finished = _finished(out, identity, config.broken)
            return finished or _write(out, config, tokenizer, sides, identity)
    except OSError as error:
        raise ConfigError(f"{out}: shards cannot be written there: {error}.") from error
    except CrewError as error:
        fix = "the same command goes on; with processes=1 it takes the least memory."
        raise ConfigError(f"{error} Fix: {fix}") from error


def _write(
    out: Path,
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    sides: Mapping[str, Sequence[TextFile]],
    identity: Mapping[str, Any],
) -> list[Shards]:
    began = time.perf_counter()
    journal = Journal(out / NAME, identity)
    journal.begin()
    for torn in out.glob(f"*/*{PARTIAL}"):
        torn.unlink()
    _save(tokenizer, out / TOKENIZER)
    recipe = Recipe(tokenizer, dtype_of(tokenizer.vocab), config.broken)
    size = max(1, round(config.shard_mb * 1e6))
    tasks = [ShardTask(s, n, spans) for s in SIDES for n, spans in enumerate(spans_of(sides[s], size))]
    left = [task for task in tasks if not _there(out, task, journal, recipe)]
    _tell_start(out, tasks, left)
    refused: dict[tuple[str, int], Made] = {}

    def do(task: ShardTask, advance: Advance) -> Made:
        return write_shard(task.spans, recipe, out / task.side / task.file, advance)

    with WriteProgress(sum(task.bytes for task in left)) as progress:
        processes = config.processes or len(os.sched_getaffinity(0))
        for task, made in work(left, do, processes, progress.advance):
            place = (task.side, task.number)
            if made.refused:
                refused[place] = made
            else:
                journal.add(place, made)
    if refused:
        raise _refusal(refused)
    made_from = json.dumps(identity)
    found = [_header(out / side, recipe, made_from, tasks, journal) for side in SIDES]
    for shards in found:
        write_header(shards)
    journal.end()
    new = sum(journal.done[task.side, task.number].tokens for task in left)
    _tell_end(out, found, new, time.perf_counter() - began)
    return found


# ------------------------------------------------------------------ what is there


def _identity(
    config: TokenizeConfig, tokenizer: Tokenizer, sides: Mapping[str, Sequence[TextFile]]
) -> dict[str, Any]:
    """What the shards' bytes hang on."""
    files = [[side, s.name, s.size, s.stamp] for side in SIDES for s in sides[side]]
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.key,
        "files": f"{len(files)} files, {hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]}",
        "shard_mb": config.shard_mb,
    }


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file. Fix: name a folder.")
    if out.is_dir() and not (out / NAME).exists() and not any((out / s / HEADER).exists() for s in SIDES):
        # Folders alone are what a job leaves that was killed at once.
        files = sorted(p for p in out.rglob("*") if p.is_file() and p.suffix not in (".lock", ".partial"))
        if files:
            shown = first_few([str(p.relative_to(out)) for p in files], SHOWN)
            raise ConfigError(report(f"out={out} holds something else:", shown, "an empty folder."))


def _finished(out: Path, identity: Mapping[str, Any], broken: str) -> list[Shards]:
    """What an earlier command has finished; nothing where something is left to do."""
    headers = [side for side in SIDES if (out / side / HEADER).exists()]
    found = [open_shards(out / side) for side in headers]
    for shards in found:
        refuse_others(out, json.loads(shards.made_from or "{}"), identity)
        if shards.broken and broken == "refuse":
            fix = "broken=skip, or mend the text and name another out."
            raise ConfigError(
                f"{shards.folder}: {shards.broken} broken places were skipped there. Fix: {fix}"
            )
    if len(headers) < len(SIDES):
        return []
    (out / NAME).unlink(missing_ok=True)
    _tell_end(out, found, 0, 0.0)
    return found


def _there(out: Path, task: ShardTask, journal: Journal, recipe: Recipe) -> bool:
    made = journal.done.get((task.side, task.number))
    path = out / task.side / task.file
    if made is not None and made.broken and recipe.broken == "refuse":
        return False
    return made is not None and path.exists() and path.stat().st_size == made.tokens * recipe.width


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    save_tokenizer(tokenizer, folder)
    of = getattr(tokenizer, "folder", None)
    for name in SETTINGS[2:] if of else ():  # where some directories alone name the end token
        if (of / name).exists():
            shutil.copyfile(of / name, folder / name)


def _header(
    folder: Path, recipe: Recipe, made_from: str, tasks: Sequence[ShardTask], journal: Journal
) -> Shards:
    named = {t.file: journal.done[t.side, t.number] for t in tasks if t.side == folder.name}
    shards = [
        Shard(file, made.tokens, made.tokens * recipe.width, made.sha256)
        for file, made in named.items()
        if made.tokens
    ]
    found = Shards(
        folder=folder,
        dtype=recipe.dtype,
        largest=max(made.largest for made in named.values()),
        documents=sum(made.documents for made in named.values()),
        vocab=recipe.tokenizer.vocab,
        tokenizer=recipe.tokenizer.key,
        eos=recipe.tokenizer.eos,
        broken=sum(made.broken for made in named.values()),
        made_from=made_from,
        shards=tuple(shards),
    )
    if not shards:
        raise ConfigError(f"{folder}: its files hold no text. Fix: name more files as files, or as held_out.")
    return found


# ------------------------------------------------------------------ messages


def _refusal(refused: Mapping[tuple[str, int], Made]) -> ConfigError:
    count = sum(made.refused for made in refused.values())
    shown = [text for _, made in sorted(refused.items()) for text in made.problems][:SHOWN]
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    fix = (
        "broken=skip leaves such lines out, replaces such bytes, and keeps the shards that are written; or "
        "mend the text, and name another out."
    )
    several = "1 place" if count == 1 else f"{count} places"
    return ConfigError(report(f"{several} of the text cannot be used:", [*shown, *more], fix))


def _tell_start(out: Path, tasks: Sequence[ShardTask], left: Sequence[ShardTask]) -> None:
    kept = f", {len(tasks) - len(left)} of them written already" if len(left) < len(tasks) else ""
    size = sum(task.bytes for task in tasks)
    print(f"{out}: {len(tasks)} shards of {size / 1e6:,.1f} MB of text{kept}", file=sys.stderr, flush=True)


def _tell_end(out: Path, found: Sequence[Shards], new: int, seconds: float) -> None:
    """Where the shards are, what they hold, and how fast that went."""
    for shards in found:
        broken = f", {shards.broken} broken" if shards.broken else ""
        text = f"{shards.tokens:,} tokens, {shards.documents:,} documents{broken}"
        print(f"{shards.folder}: {text}, in {len(shards.shards)} shards of {shards.dtype}")
    speed = (
        f"{new:,} tokens in {seconds:.1f} s: {new / seconds:,.0f} tokens/s" if new else "nothing left to do"
    )
    vocab = max(shards.vocab or 0 for shards in found)
    print(
        f"{speed}\n\nshards: {out}\ntrain on them: data=shards data.root={out} model.vocab={vocab}",
        flush=True,
    )
