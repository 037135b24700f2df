"""A worker process: one JSON task per line in, one JSON result per line out, until its input ends.

When the process that feeds it dies, however suddenly, its input ends and so does it.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    # Whatever a policy or library prints must not end up between the results.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from experiments.running.tasks import one_thread_each, perform

    one_thread_each()
    for line in sys.stdin:
        results.write(json.dumps(perform(json.loads(line))) + "\n")
        results.flush()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
