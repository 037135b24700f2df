"""`python -m tests.fake_gpu MODULE ARGUMENTS`: a command of the project, or pytest, on a GPU that is not there.

FAKE_GPU says which: `h200` by default, `h200:computes` for one with numbers (small models), `h200:compiles` for one that
builds its Triton kernels for the device. TRITON_INTERPRET is set as the kind needs it.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    # Tests look at numbers; everything else is about shapes, memory and time.
    kinds = os.environ.get("FAKE_GPU", "h200:computes" if sys.argv[1] == "pytest" else "h200").split(":")[1:]
    os.environ["TRITON_INTERPRET"] = "1" if "computes" in kinds else "0"
    from tests.fake_gpu import FakeGpu

    module, *arguments = sys.argv[1:]
    with FakeGpu(computes="computes" in kinds, compiles="compiles" in kinds):
        sys.argv = [module, *arguments]
        if module == "-c":
            exec(compile(arguments[0], "-c", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
