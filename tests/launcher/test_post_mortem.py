"""What the launcher shows of a rank's traceback: frames of the program, and all that an exception says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fnshard.launcher import post_mortem

LIBRARY, OWN = post_mortem.LIBRARY.rstrip("/"), "/srv/u/train.py"
HEAD = "Traceback (most recent call last):\n"
TEXTS = {  # behind frames: what an exception says, whatever it looks like
    "a worker's": "ValueError: Caught ValueError in DataLoader worker process 0.\n"
    f'Original Traceback (most recent call last):\n  File "{LIBRARY}/tree.py", line 1, in f\n'
    "    raise ValueError\nValueError: row 3\n\nof a file",
    "of torch.fx": 'RuntimeError: no rule\n\nOriginal traceback:\n  File "/srv/u/model.py", line 7, in f\n'
    "    return x + y",
    "with a traceback": f'MyError: it said\nTraceback (most recent call last):\n  File "{LIBRARY}/a.py"'
    ", line 1, in f\n    g()\nKeyError: 1",
    "nothing": "SystemExit",
}


@pytest.mark.parametrize("before", ["", f'{HEAD}  File "{OWN}", line 1, in g\n    h()\nKeyError: 0\n\n'
    "During handling of the above exception, another exception occurred:\n\n"])  # fmt: skip
@pytest.mark.parametrize("kind", TEXTS)
def test_what_an_exception_says_is_shown_whole(kind: str, before: str) -> None:
    frames = f'  File "{LIBRARY}/launcher/rank.py", line 9, in run\n    fn()\n'
    own = f'  File "{OWN}", line 3, in main\n    step()\n    ~~~~^^\n  File "{LIBRARY}_too/b.py", line 1\n'
    text = f"{before}{HEAD}{frames}{own}{TEXTS[kind]}"
    assert post_mortem.drop_internal_frames(text) == f"{before}{HEAD}{own}{TEXTS[kind]}"
    data = {"message": {"extraInfo": {"py_callstack": text}}}
    failure = SimpleNamespace(error_file_data=data, timestamp=0, exitcode=1)
    told = post_mortem.PostMortem({0: failure}).describe(1, Path("logs"))
    assert told.startswith(f"rank 0 of 1 failed: {TEXTS[kind].splitlines()[0]}\n") and TEXTS[kind] in told
