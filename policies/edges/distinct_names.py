"""Short names of policies, runs, traces and models that stay different: a name that two things share is no key.

A table, a figure and a folder name things by what people call them. `v1/my.py:Mine` and `v2/my.py:Mine` are both called
Mine; then as much of their paths is shown as tells them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

LONGEST_FOLDER_NAME = 120
"""Letters, so that what is added to it (a repeat, a suffix) still fits into the 255 bytes of a file system."""


def distinct_names(names: Sequence[str], forms: Callable[[str], list[str]] | None = None) -> list[str]:
    """A short name for each, in order, no two alike; something given twice is called by a number as well.

    forms: the ways in which one thing may be called, the shortest first; tails of its path unless given.
    """
    ways = [(forms or tails)(name) for name in names]
    level = [0] * len(names)
    while True:
        shown = [way[min(at, len(way) - 1)] for way, at in zip(ways, level)]
        count = Counter(shown)
        longer = [n for n, name in enumerate(shown) if count[name] > 1 and level[n] < len(ways[n]) - 1]
        if not longer:
            return _numbered(shown)
        for number in longer:
            level[number] += 1


def tails(name: str) -> list[str]:
    """The last part of a path, the last two, and so on; of `file.py:Class`, the class and then the same."""
    path, colon, inner = name.rpartition(":")
    in_file = bool(colon) and path.endswith(".py")
    parts = [part for part in PurePath(path if in_file else name).parts if part != "/"]
    if len(parts) < 2 and not in_file:
        return [name]
    ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    return [inner, *(f"{end}:{inner}" for end in ends), name] if in_file else [*ends, name]


def file_forms(name: str) -> list[str]:
    """How a trace or model file is called: up to its first dot, by its whole name, then with folders."""
    return list(dict.fromkeys((PurePath(name).name.partition(".")[0] or name, *tails(name))))


def folder_names(labels: Sequence[str]) -> list[str]:
    """Each label as the name of a folder, in order, no two alike: letters, digits, - _ and . only, no way out of it."""
    return _numbered([folder_name(label) for label in labels], "-{}")


def folder_name(label: str) -> str:
    """One label as the name of a file or folder; others of the same list may get the same (`folder_names`)."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in label)
    # Bytes count, not letters; and a name of dots alone is a way to another folder.
    while len(safe.encode()) > LONGEST_FOLDER_NAME:
        safe = safe[:-1]
    return f"-{safe.lstrip('.')}" if not safe.strip(".") or safe.startswith(".") else safe


def _numbered(names: Sequence[str], form: str = " ({})") -> list[str]:
    """The same names; the second of equal ones with a 2 behind it, and so on."""
    found: dict[str, None] = {}
    for name in names:
        shown, number = name, 2
        while shown in found:
            shown, number = name + form.format(number), number + 1
        found[shown] = None
    return list(found)
