"""How far the numbers can be trusted: where costs came from, what was measured, versions, how to do it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from metrics.run_folder.folder import json_ready
from metrics.run_folder.tables import RunTables


def trust_of(runs: Mapping[str, RunTables], notes: Sequence[str]) -> str:
    """The trust section: sentences first, then facts per run, then the whole config of each."""
    lines = [*_sentences(runs), *notes]
    parts = ["<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"] if lines else []
    for label, run in runs.items():
        parts.append(_facts(label, run))
    return "".join(parts)


def _sentences(runs: Mapping[str, RunTables]) -> list[str]:
    lines = []
    for name in dict.fromkeys(
        str(run.config.get("cost_model"))
        for run in runs.values()
        if run.config.get("cost_model") and run.config.get("world") != "live"
    ):
        own = next(run for run in runs.values() if str(run.config.get("cost_model")) == name)
        lines.append(f"Costs come from {name}: {own.summary.get('cost_basis')}.")
    for label, run in runs.items():
        summary = run.summary
        if run.config.get("world") == "live":
            lines.append(f"{label} was measured live; its times are a clock's.")
        if summary.get("overloaded"):
            lines.append(f"{label} is overloaded: its queue grows without end, and its latencies with it.")
        if summary.get("warmup_requests"):
            lines.append(
                f"{label}: the first {summary['warmup_requests']} requests are left out of the statistics (warm-up)."
            )
        lost = {status: summary.get(status) for status in ("rejected", "failed", "aborted") if summary.get(status)}
        if lost:
            spoken = ", ".join(f"{count} {status}" for status, count in lost.items())
            lines.append(f"{label}: {spoken}; latencies are those of finished requests alone.")
        trace_notes = (
            (run.config.get("trace") or {}).get("notes") if isinstance(run.config.get("trace"), Mapping) else None
        )
        lines += [f"{label}, trace: {note}" for note in trace_notes or ()]
    return list(dict.fromkeys(lines))


def _facts(label: str, run: RunTables) -> str:
    config = run.config
    trace = config.get("trace") if isinstance(config.get("trace"), Mapping) else {}
    rows = {
        "world": config.get("world"),
        "policy": f"{config.get('policy')} {_knobs(config.get('knobs'))}",
        "model": config.get("model"),
        "GPU": config.get("gpu"),
        "costs": config.get("cost_model"),
        "trace": f"{trace.get('name')}, {trace.get('requests')} requests over {trace.get('span_s', 0):.0f} s"
        if trace
        else None,
        "KV": f"{config.get('num_blocks')} blocks of {config.get('block_size')} tokens",
        "time that rests on measurements": _measured(config),
        "seed": config.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in (config.get("versions") or {}).items()),
    }
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in rows.items()
        if value is not None
    )
    whole = escape(json.dumps(json_ready(config), indent=1))
    return (
        f"<h3>{escape(label)}</h3>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Facts of {escape(label)}">'
        f"<table>{cells}</table></div>"
        f"<details><summary>config.json: everything needed to run {escape(label)} again</summary>"
        f'<pre tabindex="0">{whole}</pre></details>'
    )


def _measured(config: Mapping[str, Any]) -> str | None:
    evidence = config.get("cost_evidence")
    share = evidence.get("measured_share") if isinstance(evidence, Mapping) else None
    return f"{share:.0%}" if isinstance(share, int | float) else None


def _knobs(knobs: Any) -> str:
    if not isinstance(knobs, Mapping) or not knobs:
        return ""
    plain = {name: value for name, value in knobs.items() if isinstance(value, bool | int | float | str)}
    return "(" + ", ".join(f"{name} {value}" for name, value in plain.items()) + ")"
