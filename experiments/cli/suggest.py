"""Nearest: what somebody may have meant by a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of dotted `words` that was probably meant, if any: the same name elsewhere, then what looks
    most alike, as a whole or in its last part.

    >>> known = ["run.steps", "run.seed", "optimizer.lr", "strategy"]
    >>> [nearest(word, known) for word in ("run.stpes", "steps", "optim.lr", "stratgy", "model.depth")]
    ['run.steps', 'run.steps', 'optimizer.lr', 'strategy', None]
    """
    known = list(words)
    same = [w for w in known if _last(w) == _last(word).lower()]
    if same:
        return max(same, key=lambda w: difflib.SequenceMatcher(None, w, word).ratio())
    whole = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    if whole:
        return whole[0]
    by_last: dict[str, str] = {}
    for each in known:
        by_last.setdefault(_last(each), each)
    alike = difflib.get_close_matches(_last(word).lower(), by_last, n=1, cutoff=0.75)
    return by_last[alike[0]] if alike else None


def no_such_key(key: str, keys: Collection[str], groups: Collection[str] = ()) -> str:
    """What is said of a key that is not there.

    >>> no_such_key("run.stpes", ["run.steps", "run.seed", "mesh.shard"])
    'no such key. Did you mean run.steps? run has steps, seed.'
    >>> no_such_key("z", ["mesh.shard"], ["strategy"])
    'no such key. The top has mesh, strategy.'
    """
    at, below = "The top", list(dict.fromkeys([k.partition(".")[0] for k in keys] + list(groups)))
    parts = key.split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length]) + "."
        inside = list(dict.fromkeys(k[len(prefix) :].partition(".")[0] for k in keys if k.startswith(prefix)))
        if inside:
            at, below = prefix[:-1], inside
    meant = nearest(key, [*keys, *groups])
    hint = f"Did you mean {meant}? " if meant else ""
    return f"no such key. {hint}{at} has {', '.join(below)}."


def no_such_choice(group: str, choice: object, choices: Collection[str]) -> str:
    """What is said of a file that a group does not have.

    >>> no_such_choice("strategy", "zer2", ["auto", "zero2", "zero3"])
    'no such choice. Did you mean strategy=zero2? strategy has auto, zero2, zero3.'
    """
    meant = difflib.get_close_matches(str(choice).lower(), choices, n=1, cutoff=0.5)
    hint = f"Did you mean {group}={meant[0]}? " if meant else ""
    return f"no such choice. {hint}{group} has {', '.join(choices)}."


def _last(word: str) -> str:
    return word.rpartition(".")[2]
