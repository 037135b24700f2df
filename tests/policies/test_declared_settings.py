"""A setting is declared once; checks, flags, files of settings and the documentation follow from it."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from policies.edges.declared_settings import check_declared, flags_of, from_plain, setting, values_of_flags, with_flags
from policies.edges.errors import PolicyError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Oven:
    heat: float = setting(180.0, "Degrees.", group="Heat", above=0, most=300)
    mode: str = setting("air", "How.", group="Heat", choices=("air", "steam"))
    trays: int | None = setting(None, "Trays.", group="Room", least=1)
    minutes: tuple[int, ...] = setting(
        (),
        "Minutes of each.",
        group="Room",
        typed=str | None,
        parse=lambda text: tuple(map(int, text.split("+"))),
        listed=int,
    )
    light_off: bool = setting(
        True, "Bake with light.", group="Room", flag="--light", typed=bool, parse=lambda on: not on
    )
    recipe: str = setting("bread", "Only in a file.", flag="")

    def __post_init__(self) -> None:
        check_declared(self, PolicyError)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heat": 0.0}, "--heat: found 0, expected above 0 and at most 300"),
        ({"heat": 300.5}, "--heat: found 300.5, expected above 0 and at most 300"),
        ({"mode": "fire"}, "--mode: found 'fire', expected air or steam"),
        ({"trays": 0}, "--trays: found 0, expected at least 1"),
        ({"trays": True}, "--trays: found True, expected a whole number"),
        ({"recipe": 3}, "config: recipe: found 3, expected a text"),
    ],
)
def test_a_value_out_of_its_bounds_is_named_by_its_flag(values, message):
    with pytest.raises(PolicyError) as refused:
        Oven(**values)
    assert str(refused.value).startswith(message)


def test_bounds_themselves_are_allowed_where_the_words_say_so():
    assert Oven(heat=300.0, trays=1).heat == 300.0


def command_line(arguments: list[str]) -> tuple[Oven, object]:
    app, got = typer.Typer(), []

    @app.command()
    @with_flags(flags_of(Oven, typer.Option), mode="steam")
    def bake(**shared: object) -> None:
        got.append(Oven(**values_of_flags(Oven, {name: value for name, value in shared.items() if value is not None})))

    done = CliRunner().invoke(app, arguments)
    return got[0] if got else None, done


def test_flags_become_values_of_the_fields():
    oven, done = command_line(["--heat", "200", "--minutes", "10+20", "--light"])
    assert done.exit_code == 0
    assert oven == Oven(heat=200.0, mode="steam", minutes=(10, 20), light_off=False)


def test_what_only_a_file_offers_is_no_flag():
    assert command_line(["--recipe", "cake"])[1].exit_code == 2


def test_a_file_may_spell_a_key_with_hyphens_and_not_invent_one():
    assert from_plain(Oven, {"light-off": False, "minutes": [5]}, PolicyError).minutes == (5,)
    with pytest.raises(PolicyError, match="config: unknown key 'salt'; known keys: heat, light_off"):
        from_plain(Oven, {"salt": 1}, PolicyError)


def test_the_page_of_settings_is_written_from_the_declarations():
    page = runpy.run_path(str(ROOT / "docs" / "settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page, "run: python docs/settings.py"
