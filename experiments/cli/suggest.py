"""What somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

SYNONYMS = {"batch_size": "rows", "gpus": "ranks", "learning_rate": "lr", "precision": "dtype"}


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of dotted `words` that was probably meant, if any: the same name elsewhere, then what looks
    most alike, as a whole or in its last part.

    >>> known = ["run.steps", "run.seed", "optimizer.lr", "strategy"]
    >>> [nearest(word, known) for word in ("run.stpes", "steps", "optim.lr", "stratgy", "model.depth")]
    ['run.steps', 'run.steps', 'optimizer.lr', 'strategy', None]
    >>> nearest("learning_rate", known)
    'optimizer.lr'
    """
    known = list(words)
    by_end = {w.rpartition(".")[2]: w for w in reversed(known)}
    end = word.rpartition(".")[2].lower()
    end = SYNONYMS[end] if SYNONYMS.get(end) in by_end else end
    if end in by_end:
        return by_end[end]
    if close := difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7):
        return close[0]
    return next(map(by_end.get, difflib.get_close_matches(end, by_end, n=1, cutoff=0.75)), None)


def no_such_key(key: str, keys: Collection[str]) -> str:
    """The message about a key that does not exist.

    >>> no_such_key("run.stpes", ["run.steps", "run.seed", "mesh.shard"])
    'no such key. Did you mean run.steps? run has steps, seed.'
    >>> no_such_key("z", ["mesh.shard", "strategy"])
    'no such key. The top has mesh, strategy.'
    """
    at = key.rpartition(".")[0]
    while at and not any(k.startswith(f"{at}.") for k in keys):
        at = at.rpartition(".")[0]
    prefix = f"{at}." if at else ""
    below = [k.removeprefix(prefix).partition(".")[0] for k in keys if k.startswith(prefix)]
    meant = nearest(key, keys)
    hint = f"Did you mean {meant}? " if meant else ""
    return f"no such key. {hint}{at or 'The top'} has {', '.join(dict.fromkeys(below))}."


def no_such_choice(group: str, choice: object, choices: Collection[str]) -> str:
    """The message about a choice that a group does not have.

    >>> no_such_choice("strategy", "zer2", ["auto", "zero2", "zero3"])
    'no such choice. Did you mean strategy=zero2? strategy has auto, zero2, zero3.'
    """
    meant = difflib.get_close_matches(str(choice).lower(), choices, n=1, cutoff=0.5)
    hint = f"Did you mean {group}={meant[0]}? " if meant else ""
    return f"no such choice. {hint}{group} has {', '.join(choices)}."
