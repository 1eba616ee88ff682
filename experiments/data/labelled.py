"""Labelled records as samples of tokens: texts with a class, words with tags, and two texts that belong
together.

Here a sample's `learned` is 1 + the class of the text or word that ends at a token, and 0 where none ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.data.chat import Sample
from experiments.data.fields import COUNTS, Record, find_counts, is_nothing
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.files import LineError

TEXTS = ("text", "sentence", "content")
LABELS = ("label", "class", "category")
WORDS = ("tokens", "words")
TAGS = ("tags", "labels", "ner_tags")
QUERIES = ("query", "anchor", "question", "sentence1")
POSITIVES = ("positive", "pos", "document", "passage", "answer", "sentence2")
# Fields that tell twins from texts that do not belong together, and texts that belong to neither.
ALIKE = ("label", "score", "similarity")
NEGATIVES = ("negative", "negatives", "neg")
MOST_CLASSES = 255
KNOWN = {
    "labels": "'text' and 'label', 'tokens' and 'tags'",
    "twins": "'query' and 'positive', 'anchor' and 'positive', 'question' and 'answer'",
}


def kinds_of_labels(record: Record) -> list[str]:
    """Return the kinds, "labels" and "twins", whose fields a record has."""
    kinds = []
    if (_has(record, TEXTS) and _has(record, LABELS)) or (_has(record, WORDS) and _has(record, TAGS)):
        kinds.append("labels")
    if _has(record, QUERIES) and _has(record, POSITIVES):
        kinds.append("twins")
    return kinds


def _has(record: Record, names: Sequence[str]) -> bool:
    return any(record.get(name) is not None for name in names)


def classes_in(records: Iterator[Record]) -> list[str]:
    """Return the classes that records name, in the order of their names, and of their numbers if all are
    whole numbers. Broken records are passed over."""
    classes: set[str] = set()
    for record in records:
        try:
            _, labels = _read_labels(record)
        except LineError:
            continue
        classes |= set(labels)
    return sorted(classes, key=int if all(re.fullmatch(r"-?\d+", name) for name in classes) else str)


def encode_labels(
    record: Record, tokenizer: DirectoryTokenizer, classes: Sequence[str], by_word: bool
) -> list[Sample]:
    """Tokenise a text with a class at its last token, or words with a class at the last token of each.

    Raises:
        LineError: the record has another form, or a class that is none of `classes`.
    """
    _refuse_counts(record)
    words, labels = _read_labels(record)
    if by_word != any(isinstance(record.get(name), list) for name in WORDS):
        raise LineError(f"is one of objective.level={'sequence' if by_word else 'token'}")
    if unknown := sorted(set(labels) - set(classes)):
        raise LineError(
            f"names the class {', '.join(map(repr, unknown))}, and the classes are {', '.join(classes)}"
        )
    # The words are tokenised as one text, so that each has the tokens that it has in a sentence.
    text = " ".join(words)
    encoded = tokenizer.hf(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
    )
    ids, learned = list(encoded.input_ids), np.zeros(len(encoded.input_ids), np.uint8)
    ends = [end for _, end in encoded.offset_mapping]
    stop = 0  # the end of the word in the text
    for word, label in zip(words, labels, strict=True):
        stop += len(word)
        # A word's label is at the last token that ends no later than the word.
        at = max((n for n, end in enumerate(ends) if end <= stop), default=0)
        if at < len(learned):
            learned[at] = 1 + classes.index(label)
        stop += 1  # the space behind it
    # Tokens that begin and end a text have no label.
    begin = len(tokenizer.begin)
    mask = np.concatenate([np.zeros(begin, np.uint8), learned, np.zeros(1, np.uint8)])
    return [(np.array([*tokenizer.begin, *ids, tokenizer.eos], np.uint32), mask)]


def encode_twins(record: Record, tokenizer: DirectoryTokenizer) -> list[Sample]:
    """Tokenise two texts that belong together, as two samples, whose last tokens are marked.

    Raises:
        LineError: the record has another form, or says that its texts do not belong together.
    """
    # Refuse fields that say more than that the two belong together.
    _refuse_counts(record)
    said = [name for name in ALIKE if not is_nothing(record.get(name))]
    if unlike := [name for name in said if str(record[name]) not in ("1", "1.0", "True")]:
        raise LineError(
            f"{unlike[0]}: {record[unlike[0]]!r:.60} may say that the texts do not belong together; keep the "
            "records whose texts do, and leave this field out"
        )
    if negatives := [name for name in NEGATIVES if not is_nothing(record.get(name))]:
        raise LineError(
            f"{negatives[0]}: texts that belong to neither are not learned from (others of the batch are); "
            "leave this field out"
        )

    # Tokenise both.
    texts = [_read_text(record, _find_name(record, names, "twins")) for names in (QUERIES, POSITIVES)]
    samples = []
    for text in texts:
        ids = [*tokenizer.begin, *tokenizer.encode(text), tokenizer.eos]
        mask = np.zeros(len(ids), np.uint8)
        mask[-2:] = 1  # the last token of the text, and the end
        samples.append((np.array(ids, np.uint32), mask))
    return samples


def find_unread(record: Record, kind: str) -> list[str]:
    """Return the fields of a record that its kind does not read."""
    if kind == "twins":
        read = [_find_name(record, names, kind) for names in (QUERIES, POSITIVES)] + list(ALIKE)
    elif any(isinstance(record.get(name), list) for name in WORDS):
        read = [next(n for n in WORDS if isinstance(record.get(n), list)), _find_name(record, TAGS, kind)]
    else:
        read = [_find_name(record, names, kind) for names in (TEXTS, LABELS)]
    return [name for name in record if name not in (*read, *COUNTS) and not is_nothing(record[name])]


def _refuse_counts(record: Record) -> None:
    """Refuse a field that says how much a record counts."""
    if counts := find_counts(record):
        raise LineError(
            f"{counts[0]}: says how much a record counts, which cannot be obeyed; leave records out, or "
            "repeat them"
        )


def _read_labels(record: Record) -> tuple[list[str], list[str]]:
    """Return the words of a record and the class of each. A text counts as one word."""
    words = next((name for name in WORDS if isinstance(record.get(name), list)), None)
    if words is None:
        text, label = _find_name(record, TEXTS, "labels"), _find_name(record, LABELS, "labels")
        return [_read_text(record, text)], [_read_label(record[label], label)]
    tags = _find_name(record, TAGS, "labels")
    wrong = [n for n in (words, tags) if not isinstance(record[n], list) or not record[n]]
    if wrong:
        raise LineError(f"{wrong[0]}: expected a list of one thing at least")
    if len(record[words]) != len(record[tags]):
        raise LineError(f"{words} are {len(record[words])}, and {tags} {len(record[tags])}")
    if odd := [word for word in record[words] if not isinstance(word, str) or not word.strip()]:
        raise LineError(f"{words}: expected words, got {odd[0]!r:.60}")
    return list(record[words]), [_read_label(tag, tags) for tag in record[tags]]


def _find_name(record: Mapping[str, Any], names: Sequence[str], kind: str) -> str:
    """Return the first of some names that a record has; `kind` is for the error if it has none."""
    name = next((n for n in names if record.get(n) is not None), None)
    if name is None:
        present = ", ".join(map(repr, record)) or "no fields"
        raise LineError(f"has none of {KNOWN[kind]}; it has {present}")
    return name


def _read_text(record: Record, name: str) -> str:
    """Return a field that has to be a text with words."""
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise LineError(f"{name}: expected a text, got {value!r:.60}")
    return value


def _read_label(value: Any, name: str) -> str:
    """Return a class as a text, since files name classes by words or by numbers."""
    if not isinstance(value, str | int) or value == "":
        raise LineError(f"{name}: expected a name or a whole number, got {value!r:.60}")
    return str(value)
