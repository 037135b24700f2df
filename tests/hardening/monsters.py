"""Files that no reader expects, and folders that hold one of them in place of a good file."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
from pathlib import Path

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "line ends": b"\n\n\n",
    "NULs": bytes(100),
    "a byte order mark": b"\xef\xbb\xbf",
    "UTF-16": "arrival_s,prompt_tokens,output_tokens\n0,1,1\n".encode("utf-16"),
    "Latin-1": "é,ü\n1,2\n".encode("latin-1"),
    "every byte": bytes(range(256)) * 10,
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "100 levels too many": b"[" * 300 + b"]" * 300,
    "a number beyond floats": b"1e999",
    "a number of 10,000 digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "NaN": b'{"rate_scale": NaN}',
    "a list": b"[1, 2, 3]",
    "null": b"null",
    "half a surrogate": b'{"model": "\\ud800"}',
    "columns twice": b"a,a,a\n1,2,3\n",
    "an open quote": b'"a,b\n1,2',
    "100,000 commas": b"," * 100_000,
    "not parquet": b"PAR1" + bytes(100) + b"PAR1",
    "not zip": b"PK\x03\x04" + bytes(100),
    "gzip": gzip.compress(b"a,b\n1,2\n"),
    "keys twice": b"a = 1\na = 2\n",
    "infinity": b"rate_scale = inf\n",
    "nested TOML": b"a = " + b"[" * 5_000,
    "an open table": b"[trace\n",
    "escape sequences": b"\x1b[2J\x1b[31m,a\n1,2\n",
    "GGUF of 2^60 facts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
    "GGUF of a list of 2^62": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + struct.pack("<Q", 1)
    + b"a"
    + struct.pack("<IIQ", 9, 9, 1 << 62),
    "GGUF nested without end": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + struct.pack("<Q", 1)
    + b"a"
    + struct.pack("<I", 9)
    + struct.pack("<IQ", 9, 1) * 20_000,
    "GGUF with a name of bytes": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1000) + b"\xff" * 1000,
    "a header of 2^62 bytes": struct.pack("<Q", 1 << 62) + b"{}",
    "a header without tensors": struct.pack("<Q", 2) + b"{}",
}


SOME = (
    "empty",
    "NULs",
    "Latin-1",
    "every byte",
    "deep objects",
    "NaN",
    "a list",
    "half a surrogate",
    "not parquet",
    "columns twice",
    "infinity",
)
GGUF = tuple(name for name in CONTENTS if name.startswith("GGUF"))


def monsters(folder: Path, suffix: str, some: bool = True) -> dict[str, Path]:
    """Name -> path of monsters, under names that end in `suffix`; some: those that tell readers apart."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    chosen = {name: CONTENTS[name] for name in (*SOME, *GGUF)} if some and suffix == ".gguf" else CONTENTS
    chosen = {name: chosen[name] for name in SOME} if some and suffix != ".gguf" else chosen
    for number, (name, content) in enumerate(chosen.items()):
        found[name] = folder / f"m{number}{suffix}"
        found[name].write_bytes(content)
    found["a folder"] = folder / f"folder{suffix}"
    found["a folder"].mkdir()
    found["a pipe"] = folder / f"pipe{suffix}"
    os.mkfifo(found["a pipe"])
    found["a link to itself"] = folder / f"loop{suffix}"
    found["a link to itself"].symlink_to(found["a link to itself"])
    found["an endless device"] = folder / f"zero{suffix}"
    found["an endless device"].symlink_to("/dev/zero")
    found["nothing"] = folder / f"nothing{suffix}"
    found["a long name"] = folder / ("a" * 5_000 + suffix)
    return found


def beside(folder: Path, name: str, monster: Path, good: Path | None = None) -> Path:
    """A copy of the folder `good` (or a new one) in which the file `name` is the monster."""
    shutil.rmtree(folder, ignore_errors=True)
    if good is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(good, folder)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if len(monster.name) < 200:
        target.symlink_to(monster)
    return folder
