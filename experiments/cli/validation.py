"""The check of a whole command line, before Hydra acts on it and before torch is loaded.

Hydra's own parser reads the arguments and its loader composes the files; every problem is collected: choices
and Hydra's own keys here, keys and types by pydantic (`experiments.cli.schema`), rules by the dataclasses.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
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
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.cli import schema
from experiments.cli.allowlist import NOT_ALLOWED, is_allowed, refused
from experiments.cli.command_spec import CommandSpec
from experiments.cli.overrides import (
    MOST_JOBS,
    flags_of,
    is_of_hydra,
    jobs_of,
    parsed,
    problem_of,
    too_many,
    values_of,
)
from experiments.cli.provenance import (
    COMMAND_LINE,
    MOST_REFERENCES,
    BoundedFiles,
    cite,
    lines_of,
    source_of,
)
from experiments.cli.suggest import no_such_key
from experiments.configs.checks import ConfigError, refusal, too_large, unmakeable

READING_CPU_S = 30.0  # for all files: it is one second; defaults that name others twice each are 2^n files
SWEPT = "hydra.sweeper.params"  # arguments that a file holds
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


@dataclass(frozen=True)
class Validated:
    """A configuration, None where there are several or none is to run; and where its values come from."""

    config: Any = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def cited(self) -> Iterator[None]:
        """Add the places that values come from to a `ConfigError` that is raised within."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(cite(str(error), self.sources)) from None


class _TooSlow(BaseException):
    """No `Exception`: OmegaConf writes where it stood into those that pass it."""


def validate(spec: CommandSpec, arguments: list[str]) -> Validated:
    """What a command line means."""
    flags = flags_of(arguments)
    if flags.hydra_help or flags.shell_completion:
        return Validated()
    spec.register()
    try:
        with _bounded_cpu(), loader_of(spec, flags.config_dir) as loader:
            found, problems = _validated(replace(spec, name=flags.config_name or spec.name), loader, flags)
    except ConfigError:
        raise
    except HYDRA_ERRORS as error:  # of a file, before any argument is looked at
        raise ConfigError(_in_one_line(error)) from None
    except _TooSlow:
        message = f"the files of this configuration take more than {READING_CPU_S:g} s to read."
        raise ConfigError(message) from None
    except Exception as error:  # all of this reads what people wrote; HYDRA_FULL_ERROR=1 shows the rest
        message = f"{type(error).__name__}: {_in_one_line(error)[:200]}"
        raise ConfigError(f"the files of this configuration cannot be read: {message}") from error
    if problems:
        raise refusal(list(dict.fromkeys(problems)))
    return found


@contextmanager
def _bounded_cpu() -> Iterator[None]:
    """Raise `_TooSlow` after `READING_CPU_S`; signals are the main thread's alone."""

    def end(*_: Any) -> None:
        raise _TooSlow

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, end)
    # Again and again: what is raised inside a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_PROF, READING_CPU_S, READING_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def loader_of(spec: CommandSpec, config_dir: str | None = None) -> Iterator[ConfigLoader]:
    """Hydra's reader of the files of a command."""
    Plugins.instance().register(BoundedFiles)
    with hydra.initialize_config_dir(str(spec.conf), job_name=spec.name, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        if config_dir is not None:
            if not Path(config_dir).is_dir():
                raise ConfigError(f"--config-dir={config_dir} ({COMMAND_LINE}): is no directory.")
            path = f"{BoundedFiles.scheme()}://{Path(config_dir).resolve()}"
            loader.get_search_path().prepend("command-line", path, SearchPathQuery(provider="schema"))
        loader.repository.initialize_sources(loader.get_search_path())
        yield loader


def groups_of(spec: CommandSpec, loader: ConfigLoader) -> dict[str, list[str]]:
    """The groups of a command's defaults list, and the choices of each."""
    chosen = loader.compute_defaults_list(spec.name, [], RunMode.RUN).overrides.known_choices
    listed = loader.repository.get_group_options  # the loader's own copies every file for each group
    return {
        group: [choice for choice in listed(group) if not choice.startswith("schema_")] for group in chosen
    }


def _validated(
    spec: CommandSpec, loader: ConfigLoader, flags: argparse.Namespace
) -> tuple[Validated, list[str]]:
    overrides, problems = parsed(flags.overrides, loader)
    groups = groups_of(spec, loader)
    sweeps = flags.multirun or any(o.input_line == "hydra.mode=MULTIRUN" for o in overrides)
    searched = any(o.key_or_group in ("hydra/sweeper", "hydra.sweeper") for o in overrides)
    good, unsure = [], set()
    for override in overrides:
        wrong = problem_of(override, groups, sweeps=sweeps, searched=searched)
        if override.key_or_group not in groups and loader.repository.group_exists(override.key_or_group):
            own = ", ".join(group for group in groups if "/" not in group)
            known = schema.leaves(spec.config, {})
            other = f"is no group of this command; it has {own}."
            wrong = wrong or (other if own else no_such_key(override.key_or_group, known))
        if wrong:
            problems.append(f"{override.input_line} ({COMMAND_LINE}): {wrong}")
            unsure.add(override.key_or_group.partition(".")[0])
        else:
            good.append(override)
    jobs = math.prod(map(jobs_of, good)) if sweeps and not searched else 0
    if jobs > MOST_JOBS:
        return Validated(), [*problems, f"--multirun ({COMMAND_LINE}): {too_many(jobs)}"]
    found = Validated()
    single = not (sweeps or flags.cfg or flags.info)

    def rules(key: str) -> bool:
        """Whether the rules of a dataclass count: of a sweep its jobs find them."""
        return single and key not in unsure and bool(key or not problems)

    for chosen in _variants(good, groups):
        found, more = _composed(spec, loader, chosen, groups, rules, jobs)
        problems += more
    return (found if single else Validated()), problems


def _variants(overrides: list[Override], groups: Mapping[str, Any]) -> Iterator[list[Override]]:
    """The overrides with the first value of each sweep of a group, then every other choice of a group, which
    brings other files; sweeps of keys stay."""
    parser = OverridesParser.create()
    swept = {i: list(dict.fromkeys(o.sweep_string_iterator())) for i, o in enumerate(overrides)
             if o.is_sweep_override() and o.key_or_group in groups}  # fmt: skip
    plain = [o for i, o in enumerate(overrides) if i not in swept]

    def one(choice: Mapping[int, str]) -> list[Override]:
        return plain + parser.parse_overrides(
            [f"{overrides[i].get_key_element()}={value}" for i, value in choice.items()]
        )

    first = {i: values[0] for i, values in swept.items()}
    yield one(first)
    for i, values in swept.items():
        yield from (one(first | {i: value}) for value in values[1:])


def _composed(
    spec: CommandSpec,
    loader: ConfigLoader,
    overrides: list[Override],
    groups: Mapping[str, list[str]],
    rules: Callable[[str], bool],
    jobs: float,
) -> tuple[Validated, list[str]]:
    """What the files and arguments make together, and what is wrong with it.

    Args:
        rules: whether those of the dataclass of a key count, beside types and keys.
        jobs: what the arguments make of a sweep; 0: it is none, or a search.
    """
    lines = [_added(o, groups) for o in overrides if not o.is_sweep_override()]
    try:
        defaults = loader.compute_defaults_list(spec.name, lines, RunMode.RUN).defaults
        written = list(lines_of(defaults, loader.get_sources()))
        problems = [
            f"{key} ({source}): {NOT_ALLOWED}"
            for key, source in written
            if key.partition(".")[0] == "hydra" and not is_allowed(key)
        ]
        if problems:
            return Validated(), problems
        composed = loader.load_configuration(spec.name, lines, RunMode.RUN)
        sources = dict(written) | {o.key_or_group: COMMAND_LINE for o in overrides}
        raw: dict[str, Any] = OmegaConf.to_container(composed, resolve=False)
        if problems := [*_unbounded(raw, sources), *_of_hydra(raw, sources, jobs)]:
            return Validated(), problems
        keys = {*schema.leaves(spec.config, raw), *groups}
        problems = [f"{key} ({source_of(key, sources)}): {why}" for key, why in refused(composed.hydra, keys)]
    except HYDRA_ERRORS as error:
        return Validated(), [_in_one_line(error)]
    try:
        values = {str(name): _resolved(composed, name) for name in composed if name != "hydra"}
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        return Validated(), [f"{key}={_at(raw, key)} ({source_of(key, sources)}): {_in_one_line(error)}."]
    found = _problems(spec, values, groups, sources, rules)
    for override in overrides:
        if override.is_sweep_override() and not is_of_hydra(override):
            found += _of_sweep(spec, values, override, groups, sources)
    config = None
    if not (problems or found) and rules(""):
        config = spec.read(values)
    return Validated(config, sources), [*problems, *found]


def _added(override: Override, groups: Mapping[str, Any]) -> str:
    """An argument as Hydra composes it: a key that there is not is added, and reported with all others."""
    plain = override.type == OverrideType.CHANGE and override.key_or_group not in groups
    return f"++{override.input_line}" if plain and not is_of_hydra(override) else override.input_line


def _problems(
    spec: CommandSpec,
    values: Mapping[str, Any],
    groups: Mapping[str, Any],
    sources: Mapping[str, str],
    rules: Callable[[str], bool],
) -> list[str]:
    out = []
    for each in schema.check(values, spec.config)[1]:
        if each.is_rule:
            out += [cite(each.message, sources)] if rules(each.key) else []
            continue
        more = ""
        if each.value == schema.MISSING:
            more = f" Fix: {each.key}=..."
        elif each.key in groups and not isinstance(each.value, Mapping):
            more = f" A choice belongs to the defaults, as `- override /{each.key}: {each.value}`."
        value = "null" if each.value is None else each.value
        out.append(f"{each.key}={value} ({source_of(each.key, sources)}): {each.message}{more}")
    return out


def _of_sweep(
    spec: CommandSpec,
    values: dict[str, Any],
    override: Override,
    groups: Mapping[str, Any],
    sources: Mapping[str, str],
) -> Iterator[str]:
    """What is wrong with keys and types under each value of a sweep; its jobs find the rest."""
    for value in values_of(override):
        one = copy.deepcopy(values)
        *above, last = override.key_or_group.split(".")
        at: Any = one
        for name in above:
            at = at.setdefault(name, {}) if isinstance(at, dict) else {}
        at[last] = value
        if wrong := _problems(spec, one, groups, sources, lambda _: False):
            yield from wrong
            return


def _unbounded(raw: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """References to values that hold references are 10^n values: only so many are taken."""
    flat = {key: str(_at(raw, key)) for key in sources if "${" in str(_at(raw, key))}
    count = sum(text.count("${") for text in flat.values())
    if count > MOST_REFERENCES:
        key = max(flat, key=lambda key: flat[key].count("${"))
        most = f"{count} references ${{...}} in the values, {MOST_REFERENCES} is the most."
        yield f"{key}={flat[key][:80]} ({source_of(key, sources)}): {most}"


def _of_hydra(raw: Mapping[str, Any], sources: Mapping[str, str], jobs: float) -> Iterator[str]:
    """Numbers of Hydra's launchers and sweepers that are out of proportion; folders that cannot be made."""
    for part in ("launcher", "sweeper"):
        yield from (cite(each, sources) for each in too_large(raw["hydra"].get(part), f"hydra.{part}"))
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        written = str(_at(raw, key) or "")
        why = unmakeable(written.partition("${")[0] or ("" if not written else "."))
        if why:
            yield f"{key}={written} ({source_of(key, sources)}): {why}."
    params = raw["hydra"]["sweeper"].get("params") or {}
    lines = [f"{key}={value}" for key, value in params.items()]
    jobs *= math.prod(map(jobs_of, OverridesParser.create().parse_overrides(lines)))
    if jobs > MOST_JOBS:
        yield f"{SWEPT} ({source_of(SWEPT, sources)}): {too_many(jobs)}"


def _resolved(composed: DictConfig, name: Any) -> Any:
    if OmegaConf.is_missing(composed, name):
        return schema.MISSING
    value = composed[name]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _in_one_line(error: Exception) -> str:
    """What Hydra, OmegaConf or YAML say in several."""
    causes = [error, *([error.__cause__] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    texts = [
        re.sub(r"\s*(full_key|object_type|reference_type)[:=].*", "", str(cause), flags=re.S)
        for cause in causes
    ]
    return " ".join(" ".join(texts).split())
