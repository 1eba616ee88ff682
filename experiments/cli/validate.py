"""Asked: what a command line asks for, looked at whole before Hydra acts on it and before torch is loaded.

Every argument on its own, every line of every file that it chooses, what Hydra would make of its own part,
then the dataclasses; all problems together, each with the place it comes from and the nearest valid name.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.cli import schema
from experiments.cli.allowlist import NOT_ALLOWED, is_allowed, refused
from experiments.cli.command_spec import Form
from experiments.cli.overrides import (
    MOST_JOBS,
    UNLISTED,
    Known,
    flags_of,
    is_hydras,
    jobs_of,
    misfit,
    parsed,
    problems_of,
    too_many,
)
from experiments.cli.provenance import TYPED, Line, bounded_files, lines_of, with_sources, written_out
from experiments.cli.suggest import no_such_key
from experiments.configs.checks import ConfigError, refusal, too_large, unmakeable

READING_CPU_S = 30.0  # for all files: it is one second; defaults that name others twice each are 2^n files
SWEPT = "hydra.sweeper.params"  # arguments that a file holds
HYDRAS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


@dataclass(frozen=True)
class Asked:
    """A configuration, None where there are several or none is to run; and where its values come from."""

    config: Any = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Mistakes that are found within name the places that their values come from."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(with_sources(str(error), self.sources)) from None


def ask(form: Form, arguments: list[str]) -> Asked:
    """What the command line asks for.

    Raises:
        ConfigError: every problem that there is.
    """
    flags = flags_of(arguments)
    if flags.hydra_help or flags.shell_completion:
        return Asked()
    named = replace(form, name=flags.config_name or form.name)
    form.register()
    with loader_of(form, flags.config_dir) as loader:
        try:
            with _in_time():
                asked, problems = _asked(named, loader, flags)
        except ConfigError:
            raise
        except HYDRAS as error:  # of a file, before any argument is looked at
            raise ConfigError(_in_one_line(error)) from None
        except Exception as error:  # all of this reads what people wrote; HYDRA_FULL_ERROR=1 shows the rest
            told = f"{type(error).__name__}: {_in_one_line(error)[:200]}"
            raise ConfigError(f"the files of this configuration cannot be read: {told}") from error
    if problems:
        raise refusal(problems)
    return asked


@contextmanager
def _in_time() -> Iterator[None]:
    """What takes more than `READING_CPU_S` in here is a mistake; signals are the main thread's alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    late = ConfigError(f"the files of this configuration take more than {READING_CPU_S:g} s to read.")
    ended = False

    def end(*_: Any) -> None:
        nonlocal ended
        ended = True
        raise ConfigError(str(late))

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, READING_CPU_S, 1.0)  # again and again: something may catch the first
    try:
        yield
    except Exception:
        if ended:  # OmegaConf writes where it stood into errors that pass it
            raise late from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def loader_of(form: Form, config_dir: str | None = None) -> Iterator[ConfigLoader]:
    """Hydra's reader of the job's files.

    Args:
        config_dir: a folder of more files.
    """
    with (
        hydra.initialize_config_dir(str(form.conf), job_name=form.name, version_base="1.3"),
        bounded_files(),
    ):
        loader = GlobalHydra.instance().config_loader()
        if config_dir is not None:
            if not Path(config_dir).is_dir():
                raise ConfigError(f"--config-dir={config_dir} ({TYPED}): is no directory.")
            path = f"file://{Path(config_dir).resolve()}"
            loader.get_search_path().prepend("command-line", path, SearchPathQuery(provider="schema"))
        loader.repository.initialize_sources(loader.get_search_path())
        yield loader


def groups_of(form: Form, loader: ConfigLoader) -> dict[str, list[str]]:
    """The groups of a job's defaults list, and the choices of each."""
    chosen = loader.compute_defaults_list(form.name, [], RunMode.RUN).overrides.known_choices
    listed = loader.repository.get_group_options  # the loader's own copies every file for each group
    return {
        group: [choice for choice in listed(group) if not choice.startswith("schema_")] for group in chosen
    }


def _asked(form: Form, loader: ConfigLoader, flags: argparse.Namespace) -> tuple[Asked, list[str]]:
    overrides, problems = parsed(flags.overrides, loader)
    known = Known(schema.leaves(form.config), groups_of(form, loader))
    sweeps = flags.multirun or any(o.input_line == "hydra.mode=MULTIRUN" for o in overrides)
    good, unsure = [], set()
    searched = any(o.key_or_group in ("hydra/sweeper", "hydra.sweeper") for o in overrides)
    for override in overrides:
        wrong = list(problems_of(override, known, sweeps=sweeps))
        if override.value_type in UNLISTED and sweeps and not searched:
            line = f"{override.input_line} ({TYPED})"
            wrong.append(
                f"{line}: an interval is for a search. Fix: hydra/sweeper=search_lr; or name values, 1,2."
            )
        problems += wrong
        if wrong:
            unsure.add(re.split(r"[.@]", override.key_or_group)[0])
        else:
            good.append(override)
    jobs = math.prod(map(jobs_of, good)) if sweeps and not searched else 0
    if jobs > MOST_JOBS:
        return Asked(), [*problems, f"--multirun ({TYPED}): {too_many(jobs)}"]
    one = Asked()
    valued = not (sweeps or flags.cfg or flags.info)
    for chosen in _variants(good):
        one, more = _composed(form, loader, chosen, known, frozenset(unsure), valued=valued, jobs=jobs)
        problems += [each for each in more if each not in problems]
    return one, problems


def _variants(overrides: list[Override]) -> Iterator[list[Override]]:
    """Without sweeps: the first value of each; then every other choice of a group, which brings files."""
    parser = OverridesParser.create()
    swept = {i: list(dict.fromkeys(o.sweep_string_iterator())) for i, o in enumerate(overrides)
             if o.is_sweep_override() and o.value_type not in UNLISTED}  # fmt: skip
    plain = [o for o in overrides if not o.is_sweep_override()]

    def one(choice: Mapping[int, str]) -> list[Override]:
        lines = [f"{overrides[i].get_key_element()}={value}" for i, value in choice.items()]
        return plain + parser.parse_overrides(lines)

    first = {i: values[0] for i, values in swept.items() if values}
    yield one(first)
    for i, values in swept.items():
        if "." not in overrides[i].key_or_group:
            yield from (one(first | {i: value}) for value in values[1:])


def _composed(
    form: Form,
    loader: ConfigLoader,
    overrides: list[Override],
    known: Known,
    unsure: frozenset[str],
    *,
    valued: bool,
    jobs: float,
) -> tuple[Asked, list[str]]:
    """What the files and arguments make together, and what is wrong with it.

    Args:
        known: what may be said where nothing is chosen yet.
        unsure: groups of which an argument was left out.
        valued: whether the values have to make sense together.
        jobs: what the arguments make of a sweep; 0: it is none, or a search.
    """
    lines = [override.input_line for override in overrides]
    try:
        defaults = loader.compute_defaults_list(form.name, lines, RunMode.RUN).defaults
        written = list(lines_of(defaults, loader.get_sources()))
        paths = {default.config_path for default in defaults}
        chosen = {group: kind for group, kinds in schema.alternatives(form.config).items()
                  for name, kind in kinds.items() if f"{group}/{name}" in paths}  # fmt: skip
        problems = list(_of_keys(replace(known, keys=schema.leaves(form.config, chosen)), written, overrides))
        if problems:
            return Asked(), problems
        composed = loader.load_configuration(form.name, lines, RunMode.RUN)
        raw = OmegaConf.to_container(composed, resolve=False)
        if problems := [*written_out(raw), *_of_hydra(raw["hydra"])]:
            return Asked(), problems
        jobs *= _swept(composed)
    except HYDRAS as error:
        return Asked(), [_in_one_line(error)]
    sources = {line.key: line.source for line in written}
    sources |= {override.key_or_group: TYPED for override in overrides}
    problems = [
        f"{key} ({_nearest_source(key, sources)}): {why}"
        for key, why in refused(composed.hydra, {*known.keys, *known.groups})
    ]
    if jobs > MOST_JOBS:
        source = next((sources[key] for key in sources if key.startswith(SWEPT)), TYPED)
        problems.append(f"{SWEPT} ({source}): {too_many(jobs)}")
    problems += [
        f"{key}={said} ({_nearest_source(key, sources)}): {why}." for key, said, why in _places(composed)
    ]
    if problems or not valued:
        return Asked(), problems
    config, problems = _built(form, composed, unsure)
    return Asked(config, sources), [with_sources(problem, sources) for problem in problems]


def _of_hydra(raw: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of Hydra's launchers and sweepers that are out of all proportion."""
    for part in ("launcher", "sweeper"):
        yield from too_large(raw.get(part), f"hydra.{part}")


def _swept(composed: DictConfig) -> float:
    """Jobs that the sweeper's own keys make."""
    params = OmegaConf.select(composed, SWEPT) or {}
    lines = [f"{key}={params[key]}" for key in params]
    return math.prod(map(jobs_of, OverridesParser.create().parse_overrides(lines)))


def _places(composed: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Folders that cannot be made: key, what is written, and why."""
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        said = str(_raw(composed, key).partition("=")[2])
        why = unmakeable(said.partition("${")[0] or ("" if not said else "."))
        if why:
            yield key, said, why


def _of_keys(known: Known, written: list[Line], overrides: list[Override]) -> Iterator[str]:
    """Keys of files that there are not, or of another type; keys of arguments that this choice of files has
    not."""
    keys = known.keys
    free = tuple(f"{key}." for key, hint in keys.items() if hint is Any)
    for line in written:
        if line.key.startswith(free):
            continue
        if line.key.startswith("hydra."):
            if not is_allowed(line.key):
                yield f"{line.key} ({line.source}): {NOT_ALLOWED}"
            continue
        if line.key in keys:
            said = misfit(keys[line.key], line.value)
        elif line.key in known.groups:
            said = (
                f"has keys below it; a choice belongs to the defaults, as `- override /{line.key}: CHOICE`."
            )
        elif line.key in known.nodes:
            said = "has keys below it."
        else:
            said = no_such_key(line.key, keys)
        if said and line.value != "???":
            yield f"{line.key}={_shown(line.value)} ({line.source}): {said}"
    for override in overrides:
        key = override.key_or_group
        there = {*keys, *known.groups, *known.nodes}
        if not (key in there or is_hydras(override) or key.startswith(free)):
            yield f"{override.input_line} ({TYPED}): {no_such_key(key, keys)}"


def _built(form: Form, composed: DictConfig, unsure: frozenset[str]) -> tuple[Any, list[str]]:
    ours = [key for key in composed if key != "hydra"]
    try:
        missing = [key for name in ours for key in _missing(composed, name)]
        if missing:
            return None, [f"{key}: has to be given. Fix: {key}=..." for key in missing]
        values = {name: _plain(composed, name) for name in ours}
    except OmegaConfBaseException as error:
        return None, [f"{_raw(composed, error.full_key)}: {_in_one_line(error)}."]
    if form.build is None:
        return schema.built(values, form.config, unsure)
    problems = list(too_large(values))
    if unsure or problems:
        return None, problems
    try:
        return form.build(values), []
    except ConfigError as error:
        return None, [str(error)]


def _missing(composed: DictConfig, name: str) -> list[str]:
    if OmegaConf.is_missing(composed, name):
        return [name]
    return sorted(OmegaConf.missing_keys(composed[name])) if OmegaConf.is_config(composed[name]) else []


def _plain(composed: DictConfig, key: str) -> Any:
    value = composed[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _raw(composed: DictConfig, key: str) -> str:
    """`key=value`, as it is written."""
    value: Any = OmegaConf.to_container(composed, resolve=False)
    for part in key.split("."):
        value = value[part]
    return f"{key}={value}"


def _nearest_source(key: str, sources: Mapping[str, str]) -> str:
    """Of the key, or of what holds it."""
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return sources.get(key, "a file of a plugin")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _in_one_line(error: Exception) -> str:
    """What Hydra, OmegaConf or YAML say in several."""
    causes = [error, *([error.__cause__] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    said = [
        re.sub(r"\s*(full_key|object_type|reference_type)[:=].*", "", str(cause), flags=re.S)
        for cause in causes
    ]
    return " ".join(" ".join(said).split())
