"""Convert a training state, or a model's weights, from the format of one library to that of another.

    python -m experiments.convert FROM TO
    python -m experiments.convert checkpoint/step-300 tuned to=hf model=/models/llama

FROM is recognised by its content: a checkpoint of fnshard (or a folder of some), of
torch.distributed.checkpoint (FSDP2, torchtitan, Lightning, Accelerate), of DeepSpeed's ZeRO; a .pt or .bin
file; a Hugging Face folder. One process reads one tensor at a time; nothing in a pickle is run.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from experiments.data.model_files import read_model_config
from experiments.lib.checks import ConfigError, configuration
from experiments.lib.compose import build, exit_with
from experiments.tuning.lm import from_config
from experiments.tuning.model_directory import find_directory
from fnshard.checkpoint.foreign.dcp_writing import LAYOUTS
from fnshard.checkpoint.foreign.dialects import SavedState
from fnshard.checkpoint.foreign.formats import FORMATS, name_by_model, recognise_format
from fnshard.checkpoint.foreign.placing import explain_corrupt, read_saved
from fnshard.checkpoint.foreign.torch_files import SUFFIXES
from fnshard.errors import StateError, report
from fnshard.runtime.files.tensorfile import Corrupt

KEY_VALUE = re.compile(r"\w+=")
OF_DCP = ("layout", "optimizer")  # the keys that only `to=dcp` reads
WRITTEN = tuple(name for name, each in FORMATS.items() if each.write is not None)


@configuration
class ConvertConfig:
    """The keys of the command.

    `source` and `target` are FROM and TO. `to` is the format that is written: fnshard, dcp, torch or hf; null
    is torch where TO ends like a torch file, else dcp for a checkpoint of fnshard, and fnshard for any other.
    `model` is a model directory with a config.json, whose module says what leaves are called; null keeps
    their names. `layout` is that of a DCP folder which is written: fsdp, accelerate or torchtitan (null:
    fsdp). `optimizer` are the arguments of torch.optim.AdamW, such as '{lr: 3e-3}', that such a folder gets
    beside the moments: FSDP2 loads none without. Both are refused where no DCP folder is written.
    """

    source: str
    target: str
    to: str | None = None
    model: str | None = None
    layout: str | None = None
    optimizer: dict[str, Any] | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer a command line: two paths, and KEY=VALUE."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{ConvertConfig.__doc__}")
        return
    exit_with(lambda: convert(parse(arguments)))


def parse(arguments: Sequence[str]) -> ConvertConfig:
    """Return what a command line asks for.

    Raises:
        ConfigError: there are not two paths, or a key or a value is unknown.
    """
    # Divide the arguments. A path may look like KEY=VALUE, too.
    keys = [key for key in ConvertConfig.__dataclass_fields__ if key not in ("source", "target")]
    given = [a for a in arguments if KEY_VALUE.match(a) and not Path(a).exists()]
    settings = dict(a.split("=", 1) for a in given)
    paths = [a for a in arguments if a not in given]
    if unknown := [a for a in given if a.partition("=")[0] not in keys]:
        raise ConfigError(report("there are no such keys:", unknown, f"these are known: {', '.join(keys)}."))
    if len(paths) != 2:
        fix = "python -m experiments.convert FROM TO [KEY=VALUE]."
        raise ConfigError(report(f"two paths are needed, not {len(paths)}:", paths, fix))

    # Check the values.
    values: dict[str, Any] = {"source": paths[0], "target": paths[1], **settings}
    if "optimizer" in settings:
        try:
            values["optimizer"] = OmegaConf.to_container(OmegaConf.create(settings["optimizer"]))
        except (OmegaConfBaseException, YAMLError, AssertionError):  # the last for a number
            text = settings["optimizer"]
            raise ConfigError(
                f"optimizer={text}: expected arguments of AdamW. Fix: optimizer='{{lr: 3e-3}}'."
            ) from None
    config, wrong = build(values, ConvertConfig), []
    if config.to not in (None, *WRITTEN):
        wrong.append(f"to={config.to}: one of {', '.join(WRITTEN)}")
    if config.layout not in (None, *LAYOUTS):
        wrong.append(f"layout={config.layout}: one of {', '.join(LAYOUTS)}")
    if wrong:
        raise ConfigError(report("no such conversion:", wrong))
    return config


def convert(config: ConvertConfig) -> None:
    """Read FROM, write TO, and say in one line what was done.

    Raises:
        ConfigError: there is something at TO, or it has no use for a key.
        CheckpointError: FROM cannot be read, or TO not be written.
        StateError: `model` has other leaves than FROM.
    """
    # Find out what is read and written.
    began, source, target = time.perf_counter(), Path(config.source), Path(config.target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"there is something at {target}. Fix: name another path, or remove it.")
    known = recognise_format(source)
    if config.to is not None:
        to = config.to
    elif target.suffix in SUFFIXES:
        to = "torch"
    else:
        to = "dcp" if known == "fnshard" else "fnshard"
    idle = [f"{key}={getattr(config, key)}" for key in OF_DCP if getattr(config, key) is not None]
    if idle and to != "dcp":
        fix = "to=dcp, or leave them out."
        raise ConfigError(report(f"{target} becomes a {FORMATS[to].title}, with no use for:", idle, fix))
    folder = None if config.model is None else find_directory(config.model)
    model = None
    if folder is not None:  # built without memory: it says what leaves are called
        model = from_config(read_model_config(folder), torch.float32).model

    # Tensors are read from the open files when they are written, one at a time.
    with ExitStack() as files:
        try:
            saved = read_saved(FORMATS[known].read, source, files)
            if model is not None:
                saved = name_leaves(saved, model, f"model={config.model} is another model than {source}")
            is_dropped = bool(saved.slots) and not FORMATS[to].keeps_optimizer
            if is_dropped:
                saved = replace(saved, slots={})
            target.parent.mkdir(parents=True, exist_ok=True)
            FORMATS[to].write(
                target, saved, model=model, config=folder, layout=config.layout or "fsdp",
                optimizer=config.optimizer,
            )  # fmt: skip
        except Corrupt as error:
            raise explain_corrupt(f"cannot convert {str(source)!r}", error) from error

    # Say what was done.
    tensors = [*saved.params.values(), *(t for slot in saved.slots.values() for t in slot.values())]
    size = sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in tensors) / 1e9
    state = ""
    if is_dropped:
        state = "optimizer state is left out, "
    elif saved.slots:
        state = f"optimizer state of step {saved.step}, "
    if saved.slots and to == "dcp" and config.optimizer is None:
        state += "no group of AdamW (optimizer='{lr: 3e-3}' writes one, without which FSDP2 loads none), "
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{FORMATS[known].title} {source} -> {FORMATS[to].title} {target}: {len(saved.params)} parameters, "
        f"{state}{size:.3g} GB in {time.perf_counter() - began:.0f} s, at most {peak:.2g} GB of memory"
    )


def name_leaves(saved: SavedState, model: nn.Module, headline: str) -> SavedState:
    """Return a state whose leaves are called as a module calls them.

    Raises:
        StateError: the module has other leaves. The error names the ways out that this command has.
    """
    try:
        return name_by_model(saved, model)
    except StateError as error:
        what = str(error).partition("\nFix: ")[0]
        fix = "name the model that FROM is of; or leave model= out, and leaves keep their names."
        raise StateError(f"{headline}: {what}", fix=fix) from None


if __name__ == "__main__":
    main()
