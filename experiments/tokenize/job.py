"""The tokenising job: text files to two folders of shards, one of them held out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.configs.train import ConfigError
from experiments.data.files import first_few, read_json, write_json
from experiments.data.rows import Dataset, library
from experiments.data.shards import HEADER, Shards, describe, open_shards
from experiments.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.texts import TextFile, find, pieces, split
from fnshard.errors import report

FORMAT = 2
TOKENIZER, WORK, COMMAND = "tokenizer", "work", "tokenize.json"  # below `out`
SIDES = ("held_out", "train")
SHOWN = 8
BATCH = 64  # rows that are tokenised at once


def tokenize(config: TokenizeConfig) -> list[Shards]:
    """Write `out/train` and `out/held_out`; the same bytes with any number of processes.

    A job that was killed goes on where it was, when it is started again as before: arrays that were written
    are kept.

    Returns:
        The shards of `SIDES`.

    Raises:
        ConfigError: no text, text that is refused, a tokenizer that is none, a folder of something else, or
            one that cannot be written to.
        MissingExtraError: `datasets` is not installed.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else byte_tokenizer()
    sides = split(find(config.files), config.held_out_percent, config.held_out)
    out, command = Path(config.out), _command(config, tokenizer, sides)
    try:
        _check_free(out, command)
        began = time.perf_counter()
        if not all((out / side / HEADER).exists() for side in SIDES):
            _write(out, config, tokenizer, sides, command)
        found = [open_shards(out / side) for side in SIDES]
    except OSError as error:
        raise ConfigError(f"{out}: shards cannot be written there: {error}.") from error
    _print_end(out, found, time.perf_counter() - began)
    return found


def _write(
    out: Path,
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    sides: Mapping[str, Sequence[TextFile]],
    command: Mapping[str, Any],
) -> None:
    rows = {side: _rows(out / WORK / side, sides[side], config.processes, command) for side in SIDES}
    problems = {side: [each for each in rows[side]["problem"][:] if each] for side in SIDES}
    if config.broken == "refuse" and any(problems.values()):
        wrong = [each for side in SIDES for each in problems[side]]
        fix = "mend the text; or broken=skip, which leaves such lines out and replaces such bytes."
        several = "1 place" if len(wrong) == 1 else f"{len(wrong)} places"
        raise ConfigError(report(f"{several} of the text cannot be used:", first_few(wrong, SHOWN), fix))
    write_json(out / COMMAND, command)
    (out / TOKENIZER).mkdir(exist_ok=True)
    tokenizer.save(out / TOKENIZER)
    for side in SIDES:
        if (out / side).exists():
            continue
        partial_folder = out / f"{side}.partial"
        partial_folder.mkdir(exist_ok=True)
        size = sum(source.size for source in sides[side])
        count = min(max(1, round(size / (config.shard_mb * 1e6))), len(rows[side]))
        print(f"{out / side}: {count} shards of {size / 1e6:,.1f} MB of text", file=sys.stderr, flush=True)
        for number in range(count):
            path = partial_folder / f"{number:06d}.npy"
            if not path.exists():
                part = rows[side].shard(count, number, keep_in_memory=True)
                _save(path, _encoded(part, tokenizer, config.processes, out / WORK / f"{side}-{number}"))
        documents = int(np.count_nonzero(rows[side]["end"][:]))
        describe(
            partial_folder, documents=documents, vocab=tokenizer.vocab, tokenizer=tokenizer.key,
            eos=tokenizer.eos, broken=len(problems[side]),
        )  # fmt: skip
        partial_folder.rename(out / side)
    shutil.rmtree(out / WORK)


def _rows(
    work: Path, files: Sequence[TextFile], processes: int | None, command: Mapping[str, Any]
) -> Dataset:
    """The text of files, as `pieces` cuts it."""
    datasets = library()
    kinds = {"text": "large_string", "end": "bool", "problem": "string"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    return datasets.Dataset.from_generator(
        pieces, gen_kwargs={"files": list(files)}, features=features, cache_dir=str(work),
        num_proc=_processes(processes, len(files)), fingerprint=command["files"],
    )  # fmt: skip


def _encoded(rows: Dataset, tokenizer: Tokenizer, processes: int | None, work: Path) -> np.ndarray:
    """The tokens of rows, with an end token after each document; of the smallest type that holds them."""
    datasets = library()
    work.mkdir(parents=True, exist_ok=True)
    encode = partial(_tokens, tokenizer=tokenizer)
    encoded = rows.map(
        encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("uint32"))}),
        num_proc=_processes(processes, len(rows) // BATCH), cache_file_name=str(work / "tokens.arrow"),
        new_fingerprint=work.name, desc="tokenising",
    )  # fmt: skip
    blocks = encoded.with_format("arrow").iter(1024)
    tokens = [block["tokens"].combine_chunks().flatten().to_numpy() for block in blocks]
    found = np.concatenate(tokens).astype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    shutil.rmtree(work)
    return found


def _tokens(batch: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    end = {True: np.array([tokenizer.eos], np.uint32), False: np.empty(0, np.uint32)}
    encoded = tokenizer.encode_many(batch["text"])
    return {"tokens": [np.concatenate([i, end[e]]) for i, e in zip(encoded, batch["end"], strict=True)]}


def _save(path: Path, tokens: np.ndarray) -> None:
    """Under another name, then renamed: an array is complete or absent."""
    if len(tokens):
        aside = path.with_suffix(".writing")
        with aside.open("wb") as file:
            np.save(file, tokens)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def _processes(asked: int | None, most: int) -> int | None:
    count = min(asked or len(os.sched_getaffinity(0)), most)
    return count if count > 1 else None


# ------------------------------------------------------------------ what is there


def _command(
    config: TokenizeConfig, tokenizer: Tokenizer, sides: Mapping[str, Sequence[TextFile]]
) -> dict[str, Any]:
    """What the shards' bytes depend on."""
    files = [[side, str(s.path), s.name, s.size, s.stamp] for side in SIDES for s in sides[side]]
    own = {"format": FORMAT, "tokenizer": tokenizer.key, "shard_mb": config.shard_mb, "broken": config.broken}
    return {**own, "files": hashlib.sha256(json.dumps(files).encode()).hexdigest()}


def _check_free(out: Path, command: Mapping[str, Any]) -> None:
    """Leave alone what is something else, or what another command wrote."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file. Fix: name a folder.")
    before = read_json(out / COMMAND)
    others = sorted(p.name for p in out.iterdir() if p.name != WORK) if out.is_dir() else []
    if others and not before:
        raise ConfigError(
            report(f"out={out} holds something else:", first_few(others, SHOWN), "another out.")
        )
    differ = [f"{k}: {before[k]} there, {v} here" for k, v in command.items() if before.get(k, v) != v]
    if differ:
        fix = "another out, or delete that one."
        raise ConfigError(report(f"{out} holds shards of another command:", differ, fix))


def _print_end(out: Path, found: Sequence[Shards], seconds: float) -> None:
    """Where the shards are, and what they hold."""
    for shards in found:
        broken = f", {shards.broken} broken" if shards.broken else ""
        text = f"{shards.tokens:,} tokens, {shards.documents or 0:,} documents{broken}"
        print(f"{shards.folder}: {text}, in {len(shards.files)} shards")
    vocab = max(shards.vocab or 0 for shards in found)
    print(
        f"done in {seconds:.1f} s\n\nshards: {out}\n"
        f"train on them: data=shards data.root={out} model.vocab={vocab}",
        flush=True,
    )
