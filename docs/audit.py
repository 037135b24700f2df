"""Asks pip-audit about this environment's packages, and believes it only if it finds a fault that is known to be there.

    pip install pip-audit
    python docs/audit.py

pip-audit ends in success also where its database is out of reach and nothing was looked up ("could not be audited").
So it first has to find the faults of an old release (CANARY). Exit code 0: it could, and found none here; 1: it found
some; 2: it was not asked or could not look.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

CANARY = "jinja2==2.10"
"""Has had entries in every database since 2019."""


class AuditError(Exception):
    """Nothing is known: the audit did not take place."""


def main() -> None:
    try:
        if not faults([CANARY]):
            raise AuditError(f"it found no fault in {CANARY}, which has some")
        found = faults(installed())
    except AuditError as error:
        print(f"error: no audit took place: {error}", file=sys.stderr)
        sys.exit(2)
    for line in found:
        print(line)
    print(f"{len(installed())} packages asked about, {len(found)} faults known")
    sys.exit(1 if found else 0)


def installed() -> list[str]:
    """name==version of every package here, this project's own and editable ones left out."""
    named = [each for each in metadata.distributions() if each.metadata["Name"]]
    pairs = {(each.metadata["Name"].lower(), each.version.partition("+")[0]) for each in named}
    return sorted(f"{name}=={version}" for name, version in pairs if name != "charioteer")


def faults(packages: list[str]) -> list[str]:
    """One line per known fault. Raises AuditError where a package could not be looked up."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "packages.txt"
        listed.write_text("\n".join(packages) + "\n", encoding="utf-8")
        words = [sys.executable, "-m", "pip_audit", "-r", str(listed), "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise AuditError(f"pip-audit: {said[:300]}") from None
    skipped = [each["name"] for each in answers if "skip_reason" in each]
    if skipped or len(answers) != len(packages):
        missing = f"{len(skipped) or 'some'} of {len(packages)} packages were not looked up"
        raise AuditError(missing + (f" ({', '.join(skipped[:5])}, ...)" if skipped else ""))
    return [
        f"{each['name']} {each['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no release'}"
        for each in answers
        for fault in each["vulns"]
    ]


if __name__ == "__main__":
    main()
