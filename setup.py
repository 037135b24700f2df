"""The optional build: `CHARIOTEER_COMPILE=1 pip install .` compiles the hot modules with mypyc; otherwise nothing is.

It is the same source, and it gives the same results (docs/evidence/performance.md). A C compiler is needed, and where
the build is isolated, as pip's is, mypy comes in by itself. `CHARIOTEER_COMPILE=1 python setup.py build_ext --inplace`
compiles a checkout (mypy has to be there); whoever then edits a module deletes its compiled twin, or compiles again.
"""

import os
import runpy
import sys

from setuptools import setup

WANTED = os.environ.get("CHARIOTEER_COMPILE", "") not in ("", "0")
# Whoever only asks for names and versions, or for the sources, need not wait for a compiler.
BUILDS = not {"egg_info", "dist_info", "sdist"} & set(sys.argv)

mypycify = None
if WANTED:
    try:
        from mypyc.build import mypycify
    except ImportError:
        pass


def extensions() -> list:
    """The compiled modules."""
    files = [name.replace(".", "/") + ".py" for name in runpy.run_path("policies/edges/compiling.py")["HOT"]]
    version = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
    modules = mypycify([version, "--follow-imports=silent", *files], opt_level="3", debug_level="0")
    if sys.platform != "win32":
        for module in modules:
            # Products and sums are rounded one by one, as pure Python rounds them (C compilers for ARM fuse them).
            module.extra_compile_args.append("-ffp-contract=off")
    return modules


if WANTED and mypycify is None:
    # pip asks what this build requires.
    setup(setup_requires=["mypy[mypyc]>=2.4", "numpy", "simpy>=4.1,<5"])
elif WANTED and BUILDS:
    setup(ext_modules=extensions())
else:
    setup()
