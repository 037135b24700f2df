"""Settings declared once: a field of a config carries its default, its help, its bounds, its group and its flag.

Checks, command-line flags, `--help` and the tables of the documentation are derived from the fields. A simulated run, a
live run and the reading of a trace declare their settings this way, as policies declare their knobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from policies.edges.settings import check_settings, listed
from policies.edges.settings_file import one_spelling

if TYPE_CHECKING:
    from dataclasses import Field

_DECLARED = "setting"
Config = TypeVar("Config")
Flags = dict[str, tuple[Any, Any]]
"""Name of a parameter -> (annotation, default), as a command's signature takes them."""


@dataclass(frozen=True)
class Setting:
    """What is declared of one field beside its type and default.

    text: one line of help. group: its heading in `--help` and in the docs. flag: as it is spelt where it is not the
    field's own name, with its negation behind a slash; "" where only a file of settings offers it.
    least, above, most, below: bounds of a number. choices: what a text may be. typed: type of the flag's value where it
    is not the field's; `parse` makes the field's value of it. listed: type of the entries of a field that is a tuple.
    """

    text: str
    group: str
    flag: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    typed: Any = None
    parse: Callable[[Any], Any] | None = None
    listed: type | None = None

    @property
    def name(self) -> str:
        """The flag as a message names it: without its negation."""
        return self.flag.partition("/")[0]

    def refusal(self, value: Any) -> str | None:
        """What is wrong with a value of the right type: None where nothing is."""
        if self.choices:
            return None if value in self.choices else f"found {value!r}, expected {_either(self.choices)}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        fits = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return None if fits else f"found {_number(value)}, expected {self.range}"

    @property
    def range(self) -> str:
        """The bounds in words, as `above 0 and at most 1`; empty where there are none."""
        said = (("above", self.above), ("at least", self.least), ("below", self.below), ("at most", self.most))
        return " and ".join(f"{word} {_number(bound)}" for word, bound in said if bound is not None)


def setting(
    default: Any = MISSING,
    text: str = "",
    *,
    group: str = "",
    flag: str | None = None,
    choices: Collection[str] = (),
    make: Any = MISSING,
    **more: Any,
) -> Any:
    """A dataclass field that is a setting. make: factory of its default, where that is a table or a list.

    flag: `--name` by default, from the field's name; see `Setting` for the rest.
    """
    declared = partial(Setting, text, group, choices=tuple(choices), **more)
    metadata = {_DECLARED: (declared, flag)}
    if make is not MISSING:
        return field(default_factory=make, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def settings_of(cls: Any) -> dict[str, Setting]:
    """Every declared setting of a config class, by field name, in the order of declaration."""
    found = {}
    for entry in fields(cls):
        if _DECLARED in entry.metadata:
            declared, flag = entry.metadata[_DECLARED]
            found[entry.name] = declared("--" + entry.name.replace("_", "-") if flag is None else flag)
    return found


def check_declared(config: Any, error: type[Exception]) -> None:
    """Raise `error` for the first field whose value has not its type, or lies outside of its bounds or choices."""
    declared = settings_of(type(config))  # type: ignore[arg-type]
    check_settings(config, error, named=lambda name: _named(declared, name))
    for name, each in declared.items():
        value = getattr(config, name)
        if value is not None and (wrong := each.refusal(value)):
            raise error(f"{_named(declared, name)}: {wrong}")


def from_plain(cls: type[Config], values: Mapping[str, Any], error: type[Exception]) -> Config:
    """A config from plain data (TOML, config.json); an unknown key raises `error`, with the names of the known ones."""
    declared = settings_of(cls)  # type: ignore[arg-type]
    known = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    cleaned = {}
    for name, value in one_spelling(values, "config", error).items():
        if name not in known:
            raise error(f"config: unknown key {name!r}; known keys: {', '.join(sorted(known))}")
        kind = declared[name].listed if name in declared else None
        if kind is not None and value is not None:
            value = listed(_named(declared, name), value, kind, error)
        cleaned[name] = value
    return cls(**cleaned)


def flags_of(cls: type, option: Callable[..., Any], *, only: Collection[str] | None = None) -> Flags:
    """The command-line flags of a config's settings, in the order of declaration.

    option: makes one of a flag, its help and its heading (`typer.Option`). only: the fields asked for; all by default.
    """
    hints = get_type_hints(cls)
    flags = {}
    for name, each in settings_of(cls).items():
        if each.flag and (only is None or name in only):
            entry = next(entry for entry in fields(cls) if entry.name == name)
            bounds = {"min": 0} if each.least == 0 and hints[name] is int else {}
            made = option(each.flag, help=each.text, rich_help_panel=each.group, **bounds)
            if each.typed is None:
                flags[name] = (Annotated[hints[name], made], _default(entry))
            else:
                flags[name] = (Annotated[each.typed, made], False if each.typed is bool else None)
    return flags


def values_of_flags(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of flags that were given, as values of the config's fields."""
    declared = settings_of(cls)
    return {
        name: parse(value) if (parse := declared[name].parse) is not None else value
        for name, value in given.items()
        if name in declared
    }


def with_flags(flags: Flags, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, written as f(its own flags, **shared), these flags in its signature.

    defaults: of flags whose default is another one in this command.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            entry.replace(annotation=hints[entry.name], kind=Parameter.KEYWORD_ONLY)
            for entry in signature(command).parameters.values()
            if entry.kind is not Parameter.VAR_KEYWORD
        ]
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=annotation)
            for name, (annotation, default) in flags.items()
            if name not in hints
        ]
        command.__signature__ = Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {entry.name: entry.annotation for entry in (*shared, *own)}
        return command

    return give


def pairs(flag: str, texts: Collection[str], error: type[Exception]) -> dict[str, str]:
    """`key=value` texts as a table; raises `error`, beginning with `flag`, for one of another form."""
    table = {}
    for text in texts:
        key, equals, value = text.strip().partition("=")
        if not (key and equals and value):
            raise error(f"{flag}: found {text.strip()!r}, expected key=value")
        table[key.replace("-", "_")] = value
    return table


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default is not MISSING else None


def _named(declared: Mapping[str, Setting], name: str) -> str:
    each = declared.get(name)
    return each.name if each is not None and each.flag else f"config: {name}"


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+", "e")
