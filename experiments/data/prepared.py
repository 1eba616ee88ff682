"""Prepared data: `datasets` tokenises records once, before any rank starts, into arrays that ranks map."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np

from experiments.data.chat import Sample, hidden_fields, is_rendered
from experiments.data.fields import Exchange, has_nulls, has_objects, kinds_of, read
from experiments.data.labelled import (
    KNOWN,
    MOST_CLASSES,
    classes_in,
    encode_labels,
    encode_twins,
    find_unread,
    kinds_of_labels,
)
from experiments.data.records import NEEDS, encode, images_in, row_of, with_images
from experiments.data.rows import (
    Dataset,
    import_datasets,
    is_json,
    line_of,
    map_rows,
    readable,
    record_of,
    rows_of,
)
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.checks import ConfigError
from experiments.lib.files import (
    DamagedError,
    LineError,
    commit_folder,
    differences,
    digests_of,
    read_record,
    write_record,
)
from fnshard.errors import report

FORMAT = 9  # a part of the key, which changes when files mean something else
FACTS = "prepared.json"
ARRAYS: dict[str, type] = {"tokens": np.uint32, "learned": np.uint8, "starts": np.int64}
HELD_OUT_EVERY = 20  # one record in so many of a file that is split
BROKEN, TOO_LONG = "broken", "too_long"
NULLS = "null in tools and calls (write arguments as JSON in a text to keep it)"
ORDER = "order and types in tools and calls (the table's; write arguments as JSON in a text to keep them)"
SIDES = {"pairs": ("chosen", "rejected"), "twins": ("query", "positive")}  # the two samples of a record
OBJECTIVES = {  # a name for the records of each kind, and the objective that learns from them
    "samples": ("conversations, or prompts with a response", "objective=sft"),
    "pairs": ("pairs (prompt, chosen, rejected)", "objective=dpo"),
    "prompts": ("prompts without a response", "objective=grpo"),
    "answers": ("answers that are wanted or not (KTO)", "no objective here"),
    "labels": ("texts with a label, or words with tags", "objective=classify"),
    "twins": ("two texts that belong together (query, positive)", "objective=embed"),
}
SHOWN, LONGEST_WHY = 50, 400  # the lines of an error, and the characters of each
FEATURES = {"line": "int64", "tokens": [["uint32"]], "learned": [["uint8"]], "reason": "string",
            "why": "string", "chat": "bool", "rendered": "bool", "images": ["string"], "row": "large_string",
            "unread": ["string"], "kinds": ["string"]}  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Samples of token ids, which are mapped, so that a rank's memory holds only what it reads.

    Args:
        folder: the folder of the arrays.
        key: a text that is equal for equal files, tokenizer and settings.
        kind: "samples", "pairs", "prompts", "labels" or "twins".
        context: the most positions of a sample. One of n tokens has n - 1, since the last is only a target.
        pad: the tokenizer's padding token.
        samples: the number of samples, of which a pair has two.
        tokens, learned: the numbers of tokens, and of learned ones, of all samples.
        longest, shortest: the positions of the longest and of the shortest sample.
        chats: whether a record went through the chat template.
        rendered: the number of records whose texts spell control tokens, which are read as these.
        left_out: the numbers of records by reason, "broken" and "too_long".
        images: the most images of a sample.
        unread: fields that nothing read, with the number of records that have them.
    """

    folder: Path
    key: str
    kind: str
    context: int
    pad: int
    samples: int
    tokens: int
    learned: int
    longest: int
    shortest: int
    chats: bool = False
    rendered: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return self.samples // 2 if self.kind in SIDES else self.samples

    def __str__(self) -> str:
        learned = "" if self.kind == "prompts" else f", {self.learned} of them learned"
        many = f"{self.records} {self.kind}, {self.tokens} tokens{learned}"
        notes = [f"{count} {reason.replace('_', ' ')}" for reason, count in self.left_out.items() if count]
        read = f"; control tokens are read in the texts of {self.rendered}" if self.rendered else ""
        fields = ", ".join(f"{name} ({count})" for name, count in self.unread.items())
        ignored = f"; fields that nothing reads: {fields}" if fields else ""
        left_out = f" (left out: {', '.join(notes)})" if notes else ""
        return f"{many}; longest {self.longest}{read}{left_out}{ignored}"

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the positions that samples take in a row; int64."""
        starts = self._arrays["starts"]
        return np.asarray(starts[samples + 1] - starts[samples] - 1)

    def sample(self, number: int) -> Sample:
        """Return the token ids (uint32) of a sample, and whether each is learned (uint8)."""
        start, stop = (int(s) for s in self._arrays["starts"][number : number + 2])
        return self._arrays["tokens"][start:stop], self._arrays["learned"][start:stop]

    def images_of(self, number: int) -> list[str]:
        """Return the paths of a sample's images."""
        return self._images[number]["images"] if self.images else []

    def row_of(self, number: int) -> dict[str, Any]:
        """Return the record of a prompt, as rewards are given it (`records.row_of`)."""
        return json.loads(self._rows[number]["row"]) if self.kind == "prompts" else {}

    def classes(self) -> np.ndarray:
        """Count how often each of the classes of "labels" occurs; int64 [255]."""
        return np.bincount(self._arrays["learned"], minlength=MOST_CLASSES + 1)[1:]

    def first_learned(self) -> np.ndarray:
        """Return the place in each sample of its first learned token, or its end if there is none; int64."""
        starts, stops = self._arrays["starts"][:-1].astype(np.int64), self._arrays["starts"][1:]
        learned = np.append(np.flatnonzero(self._arrays["learned"]), stops[-1])
        return np.minimum(learned[np.searchsorted(learned, starts)], stops) - starts

    @cached_property
    def _images(self) -> Dataset:
        return import_datasets().load_from_disk(str(self.folder / "images"))

    @cached_property
    def _rows(self) -> Dataset:
        return import_datasets().load_from_disk(str(self.folder / "rows"))

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {n: np.memmap(self.folder / f"{n}.bin", dtype, "r") for n, dtype in ARRAYS.items()}


@dataclass(frozen=True)
class RecordPolicy:
    """A policy that says what becomes of records.

    Args:
        kind: "samples", "pairs", "prompts", "labels" or "twins", what a record is read as.
        context: the most positions of a sample.
        broken: "refuse", or "skip" records that cannot be used.
        too_long: "refuse", "skip" or "truncate" records with more positions than the context. Prompts are not
            truncated but left out, as are samples with images or with nothing left to learn.
        needs: what a prompt's own answer has to hold, by name in `records.NEEDS`.
        tokens: the most positions of a whole record, which are those of both sides of a pair. It is the
            budget of a micro-batch.
        answer: the most tokens of a prompt's answer, which the budget holds too.
        classes: the classes of "labels".
        words: whether each word of "labels" has a class.
        whole: whether the last token of a conversation is seen, although it is no target, as by a classifier.
    """

    kind: str
    context: int
    broken: str = "refuse"
    too_long: str = "refuse"
    needs: tuple[str, ...] = ()
    tokens: int | None = None
    answer: int = 0
    classes: tuple[str, ...] = ()
    words: bool = False
    whole: bool = False


def prepare(
    path: str | Path,
    tokenizer: DirectoryTokenizer,
    policy: RecordPolicy,
    *,
    cache: str | Path,
    split: bool = False,
) -> list[Prepared]:
    """Tokenise a file of records into a folder below `cache`, or find the one that an earlier call made.

    Every byte of a folder that is found is compared with its checksum (a GB takes about 0.2 s). Damaged data
    are prepared anew.

    Args:
        path: JSONL, a list of JSON, Parquet, or a folder of `save_to_disk` of `datasets`.
        tokenizer: the model's tokenizer.
        cache: a folder, made if need be. Processes that prepare the same may race.
        split: whether to hold out one record in `HELD_OUT_EVERY`, drawn at random, and one at least.

    Returns:
        The prepared data; with `split` those to train on, and those that are held out.

    Raises:
        ConfigError: the file cannot be read, holds nothing, or has records that are refused, by file and
            line.
        MissingExtraError: `datasets` is not installed.
    """
    # The folder's name is a digest of all that the samples depend on.
    path = readable(path)
    root = path.resolve().parent  # paths of its images are relative to it
    chosen = {name: value for name, value in vars(policy).items() if value or name == "needs"}
    facts = [FORMAT, chosen, split, tokenizer.key, tokenizer.pad, str(root) if tokenizer.images else ""]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for each in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        with each.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    folder = Path(cache) / digest.hexdigest()[:32]

    # Open what an earlier call has prepared, or prepare it.
    try:
        found = None
        if folder.exists():
            try:
                found = [open_prepared(folder / side, read_all=True) for side in _name_sides(split)]
            except ConfigError as error:
                what = str(error).partition("Fix: ")[0].strip()
                print(f"{what} It is prepared anew.", file=sys.stderr, flush=True)
                # The folder is renamed before it is deleted: processes that map the old files keep them, and
                # another process may already have moved it.
                aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
                with suppress(FileNotFoundError):
                    folder.rename(aside)
                if aside.is_dir():
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    aside.unlink(missing_ok=True)
        if found is None:
            _prepare_folder(folder, path, tokenizer, policy, split)
            found = [open_prepared(folder / side) for side in _name_sides(split)]
    except OSError as error:
        raise ConfigError(f"{cache}: prepared data cannot be written there: {error}.") from error
    if any(found[0].left_out.values()) or found[0].unread:
        print(f"{path}: {found[0]}", file=sys.stderr, flush=True)
    return found


def find_classes(path: str | Path) -> tuple[str, ...]:
    """Return the classes that the records of a file name, in order. Broken records are passed over.

    Raises:
        ConfigError: the file cannot be read, or names too few classes, or more than a byte can tell apart.
    """
    path = readable(path)
    with TemporaryDirectory() as work:
        rows = rows_of(path, Path(work))
        found = classes_in(_read_valid_records(rows))
    if not 2 <= len(found) <= MOST_CLASSES:
        said = f"{len(found)} classes{': ' if found else ''}{', '.join(found[:8])}"
        raise ConfigError(
            f"{path}: its records name {said}. Fix: records of {KNOWN['labels']} that name 2 to "
            f"{MOST_CLASSES} classes."
        )
    return tuple(found)


def _read_valid_records(rows: Dataset) -> Iterator[Mapping[str, Any]]:
    """Yield the records of rows, without those that are broken."""
    for row in rows:
        with suppress(LineError):  # `prepare` refuses such a line by its number
            yield record_of(row)


def open_prepared(folder: str | Path, *, read_all: bool = False) -> Prepared:
    """Map a folder that `prepare` made. Every rank calls it.

    Args:
        read_all: whether to compare every byte with its checksum. Otherwise sizes alone are compared, which
            is enough right after `prepare` has read all.

    Raises:
        ConfigError: the folder holds something else.
        DamagedError: the folder is not what was written.
    """
    # Read the facts about the data, which have a checksum of their own.
    folder = Path(folder)
    fix = f"delete {folder.parent}: the same command prepares it anew."
    try:
        facts = read_record(folder / FACTS, need_checksum=True)
    except DamagedError as error:
        raise DamagedError(f"{error} Fix: {fix}") from error
    if facts is None:
        raise ConfigError(f"{folder} holds no prepared data. Fix: prepare it anew.")
    # Compare the files with the facts. The key shows whether the folder was renamed or copied to this place.
    wrong = differences(folder, facts.pop("files"), read_all=read_all)
    if facts["key"] != f"{folder.parent.name}/{folder.name}":
        wrong.append(f"{FACTS}: is of {facts['key']}")
    if wrong:
        raise DamagedError(report(f"{folder} is not what was written:", wrong, fix))
    return Prepared(folder=folder, **facts)


def _name_sides(split: bool) -> tuple[str, ...]:
    return ("train", "held_out") if split else ("all",)


def _prepare_folder(
    folder: Path, path: Path, tokenizer: DirectoryTokenizer, policy: RecordPolicy, split: bool
) -> None:
    """Prepare a folder under another name and rename it, so that it is complete or absent.

    If two processes prepare the same, the folder of the first one is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        # Encode all records, and keep those that can be used.
        rows, root = rows_of(path, aside / "rows"), path.resolve().parent
        encode = partial(_encode_row, tokenizer=tokenizer, policy=policy, root=root)
        encoded = map_rows(rows, encode, FEATURES, aside / "encoded.arrow")
        kept, left_out = _keep_usable(path, encoded, policy)
        names = kept.select_columns(["unread"]).with_format("arrow")[:]["unread"].combine_chunks().flatten()
        unread = {each["values"]: each["counts"] for each in names.value_counts().to_pylist()}
        # Draw which of them are held out.
        parts = [kept]
        if split:
            if len(kept) < 2:
                raise ConfigError(
                    f"{path}: one record can be used, so none can be held out of training. Fix: name a file "
                    "to evaluate on with data.held_out=FILE, or add records."
                )
            count = max(1, len(kept) // HELD_OUT_EVERY)
            drawn = np.random.default_rng(0).permutation(len(kept))
            sides = drawn[count:], drawn[:count]
            parts = [kept.select(np.sort(side), keep_in_memory=True) for side in sides]
        # Write both sides, and give the folder its name.
        done = aside / "done"
        for side, part in zip(_name_sides(split), parts, strict=True):
            key = f"{folder.name}/{side}"
            facts = {
                "key": key, "kind": policy.kind, "context": policy.context, "pad": tokenizer.pad,
                "left_out": left_out, "unread": unread,
            }  # fmt: skip
            _write_arrays(done / side, part, facts)
        commit_folder(done, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# ------------------------------------------------------------------ from rows to arrays


def _encode_row(
    row: Mapping[str, Any], index: int, tokenizer: DirectoryTokenizer, policy: RecordPolicy, root: Path
) -> dict[str, Any]:
    """Tokenise a row. If it cannot be used, the result has a reason and no samples."""
    result = {"line": line_of(row, index), "tokens": [], "learned": [], "images": [], "reason": "", "why": "",
              "rendered": False, "row": "", "unread": [], "kinds": []}  # fmt: skip
    # Read the record and tokenise it.
    try:
        record = record_of(row)
        result["kinds"] = [*kinds_of(record), *kinds_of_labels(record)]
        if policy.kind == "labels":
            said, samples = Exchange(), encode_labels(record, tokenizer, policy.classes, policy.words)
        elif policy.kind == "twins":
            said, samples = Exchange(), encode_twins(record, tokenizer)
        else:
            said = read(record, policy.kind)
            if policy.kind == "samples":
                said, result["images"] = with_images(said, root)
            elif policy.kind == "prompts":  # the objective says itself that it draws no answers to images
                result["images"] = images_in(said)
            samples = encode(said, policy.kind, tokenizer)
        # Fields that nothing reads are counted, and named when all is done.
        turns = [turn for part in (said.prompt, *said.answers) if isinstance(part, list) for turn in part]
        hidden = hidden_fields(tokenizer, turns, said.tools)
        result["unread"] = [*said.unread, *(f"messages.{name}" for name in hidden)]
        if policy.kind in ("labels", "twins"):
            result["unread"] = find_unread(record, policy.kind)
        if policy.kind == "prompts":
            whole = row_of(record, said, tokenizer)
            result["row"] = json.dumps(whole, default=str)
            result["unread"] = []  # rewards are given all of it
            for need in policy.needs:
                NEEDS[need](whole)
    except Exception as error:  # data can be anything, and the line's number says more than a traceback
        why = str(error) if isinstance(error, LineError) else f"{type(error).__name__}: {error}"
        why = why[:LONGEST_WHY].encode("utf-8", "backslashreplace").decode()  # it may quote half a character
        return {**result, "reason": BROKEN, "why": why, "chat": False}
    if is_json(row) and has_nulls(record):
        result["unread"].append(NULLS)
    if not is_json(row) and has_objects(record):
        # In a table all objects have the same fields, in one order and of one type.
        result["unread"].append(ORDER)

    # The last token is never an input, so a conversation that is to be seen whole gets one more.
    texts = [said.prompt, *said.answers, *(text for text, _ in said.segments)]
    if policy.whole and (said.is_chat or is_rendered(tokenizer, *texts)):
        samples = [
            (np.append(ids, np.uint32(tokenizer.eos)), np.append(m, np.uint8(0))) for ids, m in samples
        ]
    result["chat"], result["rendered"] = said.is_chat, not said.is_chat and is_rendered(tokenizer, *texts)

    samples, reason, why = _apply_policy(samples, bool(result["images"]), policy)
    if reason:
        return {**result, "reason": reason, "why": why}
    return {**result, "tokens": [tokens for tokens, _ in samples], "learned": [mask for _, mask in samples]}


def _apply_policy(
    samples: Sequence[Sample], has_images: bool, policy: RecordPolicy
) -> tuple[list[Sample], str, str]:
    """Cut the samples of a record to the context, or refuse a record that is too long or teaches nothing.

    Returns:
        The samples; and `BROKEN` or `TOO_LONG` with an explanation, both of which are "" if they can be used.
    """
    is_prompt = policy.kind == "prompts"
    longest = max(len(tokens) for tokens, _ in samples) - 1
    if is_prompt:  # its own answer is for rewards alone, and no part of any row
        ids, answered = samples[0]
        longest = (int(np.argmax(answered)) if answered.any() else len(ids)) - 1

    # Half an image is no image, and half a prompt asks something else.
    is_long, why = longest > policy.context, ""
    if is_long and (policy.too_long != "truncate" or has_images or is_prompt):
        why = f"takes {longest} positions, the context has {policy.context}"
    if not is_prompt:
        samples = [tuple(part[: policy.context + 1] for part in each) for each in samples]

    # A micro-batch has to hold the whole record, and the answer that a prompt will get.
    whole = longest + policy.answer if is_prompt else sum(len(tokens) - 1 for tokens, _ in samples)
    if not why and policy.tokens is not None and whole > policy.tokens:
        with_answer = f" with an answer of {policy.answer}" if is_prompt else ""
        is_long = True
        why = f"takes {whole} positions{with_answer}, the budget of data.tokens is {policy.tokens}"

    # The first token is never a target, since nothing precedes it, but labels are at the tokens themselves.
    learns_first = policy.kind in ("labels", "twins")
    if not why and not is_prompt and not all(m[0 if learns_first else 1 :].any() for _, m in samples):
        why = "no token is left to learn"
    if not why and policy.kind == "pairs" and np.array_equal(samples[0][0], samples[1][0]):
        why = "chosen and rejected differ only after the context"
    if not why:
        return list(samples), "", ""
    return list(samples), TOO_LONG if is_long else BROKEN, why


def _keep_usable(path: Path, encoded: Dataset, policy: RecordPolicy) -> tuple[Dataset, dict[str, int]]:
    """Return the rows that can be used, and the numbers of those that cannot by reason.

    Raises:
        ConfigError: rows that the policy refuses, all of them in one error, or no row is left.
    """
    reasons = np.array(encoded["reason"][:])
    left_out = {name: int((reasons == name).sum()) for name in (BROKEN, TOO_LONG)}
    refused = [name for name, count in left_out.items() if count and getattr(policy, name) == "refuse"]
    if left_out[BROKEN]:
        _refuse_other_kind(path, encoded, reasons, policy.kind)
    # Name the refused lines, all of them in one error.
    if refused:
        wrong = encoded.select(np.flatnonzero(np.isin(reasons, refused)), keep_in_memory=True)
        lines = [f"{path}:{row['line']}: {row['why']}" for row in wrong.select(range(min(len(wrong), SHOWN)))]
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        ways = {
            BROKEN: "mend the lines, or leave such out with data.broken=skip",
            TOO_LONG: "leave long records out with data.too_long=skip, cut them with data.too_long=truncate, "
            "or take a larger data.context or data.tokens",
        }
        several = "1 line" if len(wrong) == 1 else f"{len(wrong)} lines"
        fix = "; ".join(ways[name] for name in refused)
        raise ConfigError(report(f"{several} cannot be used:", [*lines, *more], f"{fix}."))
    kept = encoded.select(np.flatnonzero(reasons == ""), keep_in_memory=True)
    if not len(kept):
        notes = [f"{count} {name.replace('_', ' ')}" for name, count in left_out.items() if count]
        raise ConfigError(f"{path}: nothing to learn from ({', '.join(notes) or 'no records'}).")
    return kept, left_out


def _refuse_other_kind(path: Path, encoded: Dataset, reasons: np.ndarray, kind: str) -> None:
    """Refuse a file whose records are all of another kind, in one error that does not list its lines."""
    # `kinds` has the kinds of data that each record could be, the likeliest first.
    known = [kinds for kinds in encoded["kinds"][:] if kinds]
    if (reasons == "").any() or not known or any(kind in kinds for kinds in known):
        return
    counts = {name: sum(kinds[0] == name for kinds in known) for name in OBJECTIVES}
    held = max(counts, key=counts.__getitem__)
    share = "all" if counts[held] == len(known) else counts[held]
    (what, other_objective), (needed, objective) = OBJECTIVES[held], OBJECTIVES[kind]
    ways = [f"name a file of {needed}"]
    if held != "answers":  # no objective learns from them
        ways = [other_objective, *ways]
    raise ConfigError(
        f"{path}: holds {what} ({share} of its {len(known)} records), and {objective} learns from {needed}. "
        f"Fix: {', or '.join(ways)}."
    )


def _write_arrays(folder: Path, part: Dataset, facts: Mapping[str, Any]) -> None:
    """Write the samples of some rows as arrays, and the facts about them."""
    folder.mkdir(parents=True)
    sizes, learned, chats, rendered, most = [], 0, False, 0, 0
    # Rows are written block by block, so that memory holds one block of them.
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "learned.bin").open("wb") as mask_file:
        for block in part.with_format("arrow").iter(1024):
            tokens, masks = (block[name].combine_chunks().flatten() for name in ("tokens", "learned"))
            lengths, mask = tokens.value_lengths().to_numpy(), masks.flatten().to_numpy()
            tokens.flatten().to_numpy().tofile(tokens_file)
            mask.tofile(mask_file)
            learned += int((mask != 0).sum())
            if facts["kind"] not in ("labels", "twins"):  # a first token is no target
                firsts = np.cumsum(lengths) - lengths
                learned -= int((mask[firsts] != 0).sum())
            chats |= any(block["chat"].to_pylist())
            rendered += sum(block["rendered"].to_pylist())
            sizes.append(lengths)
            most = max(most, *map(len, block["images"].to_pylist()))
    # Images and prompts need their rows again, which stay as a data set.
    if most:
        part.select_columns(["images"]).save_to_disk(str(folder / "images"))
    if facts["kind"] == "prompts":
        part.select_columns(["row"]).save_to_disk(str(folder / "rows"))
    lengths = np.concatenate(sizes).astype(np.int64)
    np.concatenate([[0], np.cumsum(lengths)]).tofile(folder / "starts.bin")
    known = {
        "samples": len(lengths), "tokens": int(lengths.sum()), "learned": learned, "chats": chats,
        "rendered": rendered, "images": most,
        "longest": int(lengths.max()) - 1, "shortest": int(lengths.min()) - 1,
    }  # fmt: skip
    write_record(folder / FACTS, {**facts, **known, "files": digests_of(folder)})
