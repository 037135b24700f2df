"""The optional compiled build: the same source, none of it older than what was compiled of it, still open to policies."""

import importlib
import sys
from pathlib import Path

import pytest

from policies.edges.compiling import HOT, compiled_modules, how_built


def test_every_hot_module_exists_and_is_said_to_be_what_it_is():
    files = {name: importlib.import_module(name).__file__ for name in HOT}
    assert compiled_modules() == [name for name in HOT if not files[name].endswith(".py")]
    assert how_built() == ("compiled" if compiled_modules() else "pure Python")


def test_compiled_modules_are_as_new_as_their_source():
    if not compiled_modules():
        pytest.skip("pure Python here: CHARIOTEER_COMPILE=1 python setup.py build_ext --inplace compiles this checkout")
    assert compiled_modules() == list(HOT), "compile all of them or none"
    # One library holds the code of all of them; what lies beside each source only leads there.
    library = Path(next(module.__file__ for name, module in sys.modules.items() if name.endswith("__mypyc")))
    for name in HOT:
        source = Path(importlib.import_module(name).__file__).parent / f"{name.rpartition('.')[2]}.py"
        assert library.stat().st_mtime >= source.stat().st_mtime, f"{library}: older than {source}; compile again"
