"""What --help says can be read on a terminal of 80 columns: no word of it is cut."""

from __future__ import annotations

import pytest

from tests.hardening.command_line import PACKAGES, group_of, run

VLLMS_OWN = "--long-prefill-toke…"
"""Its flag of parity is longer than the column, and called as vLLM calls it."""

COMMANDS = sorted((package, name) for package in PACKAGES for name in group_of(package).commands)


@pytest.mark.parametrize(("package", "name"), COMMANDS)
def test_no_word_of_a_commands_help_is_cut_at_80_columns(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    ended = run(package, name, "--help")
    assert ended.code == 0
    cut = [line for line in ended.out.splitlines() if "…" in line and VLLMS_OWN not in line]
    assert not cut, "\n".join(cut)


@pytest.mark.parametrize("package", ["simulator", "executor"])
def test_the_chunk_size_is_said_to_be_what_the_policies_make_of_it(package: str) -> None:
    """Every policy that has the knob counts the decodes of a batch in it."""
    command = group_of(package).commands["replay"]
    help_text = next(option.help for option in command.params if option.name == "chunk_size")
    assert help_text == "Most tokens of a batch, its decodes counted (the policy's knob)."
