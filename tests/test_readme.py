"""The README's code runs, in order, as it is printed."""

import re
from functools import partial
from pathlib import Path

import fnshard as fs

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they save
    # Compiled, each step costs 10 s; that compiled steps do the same is for other tests.
    monkeypatch.setattr(fs, "shard_step", partial(fs.shard_step, backend="eager"))
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "reduce_scatter" in printed and "gather/layers.0" in printed


def test_the_two_commands_are_what_ci_runs():
    commands = re.search(r"```bash\n(.*?)```", README.read_text(), re.S).group(1).splitlines()
    second = commands[1].split("#")[0].strip()
    assert second in (README.parent / ".ci" / "run").read_text()
