"""What the columns of a request file are called: the field's many names for the few things that a trace holds.

Names are compared in one form (lower case, words joined by underscores, so `ContextTokens`, `Context Tokens` and
`context_tokens` are one name). A unit at the end of a time's name (`_s`, `_ms`, `_us`, `_ns`) is its unit. Where a
file offers several names for one thing, the first one listed here is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAMES: dict[str, tuple[str, ...]] = {
    "arrival": (
        "arrival",
        "queued_ts",
        "arrived_at",
        "arrival_time",
        "arrival_timestamp",
        "arrival_ts",
        "arrive_time",
        "arrival_at",
        "timestamp",
        "request_timestamp",
        "request_time",
        "request_start_time",
        "send_time",
        "sent_at",
        "start_time",
        "submit_time",
        "time",
        "ts",
        "t",
    ),
    "prompt_tokens": (
        "prompt_tokens",
        "num_prompt_tokens",
        "num_prefill_tokens",
        "prefill_tokens",
        "context_tokens",
        "input_tokens",
        "num_input_tokens",
        "input_length",
        "input_toks",
        "request_tokens",
        "prompt_length",
        "prompt_len",
        "input_len",
        "context_length",
        "isl",
        "prompt",
        "input",
    ),
    "output_tokens": (
        "output_tokens",
        "num_output_tokens",
        "num_decode_tokens",
        "decode_tokens",
        "generated_tokens",
        "num_generated_tokens",
        "completion_tokens",
        "response_tokens",
        "output_length",
        "output_toks",
        "output_len",
        "response_length",
        "response_len",
        "completion_length",
        "osl",
        "output",
    ),
    "max_output_tokens": ("max_output_tokens", "max_tokens", "max_new_tokens", "max_completion_tokens"),
    "session": ("session", "session_id", "conversation_id", "conv_id", "chat_id"),
    "turn": ("turn", "turn_id", "turn_index"),
    "priority": ("priority",),
    "acceptance": ("acceptance", "acceptance_rate", "draft_acceptance"),
    "slo": ("slo", "slo_class", "service_class"),
    "tenant": (
        *("tenant", "tenant_id", "tenant_name", "customer", "customer_id", "user", "user_id", "user_name", "username"),
        *("api_key", "api_key_id", "key_id", "account", "account_id", "organization", "organization_id"),
        *("organisation", "org", "org_id", "team", "team_id", "client", "client_id", "end_user"),
    ),
    "program": ("program", "program_id", "workflow", "workflow_id", "agent_run", "job_id"),
    "predicted_tokens": (
        *("predicted_tokens", "predicted_output_tokens", "predicted_output_length", "predicted_length"),
        *("predicted_output", "prediction"),
    ),
    "abort": ("abort", "abort_at", "abort_time", "cancelled_at", "canceled_at"),
    "timeout": ("timeout", "client_timeout"),
    "prefix_hashes": ("prefix_hashes", "hash_ids", "block_hash_ids", "block_hashes", "block_ids"),
    "hash_tokens": ("hash_tokens", "block_size", "hash_block_size"),
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "input_token_ids", "input_tok_ids", "input_ids"),
    "after_row": ("after_row",),
    "joins": ("joins", "join_rows"),
    "call": ("call_id", "chat_id", "request_id", "node_id", "id"),
    "parent": ("parent_call_id", "parent_chat_id", "parent_request_id", "parent_id", "parent"),
    "delay": ("delay",),
    "think": ("think", "think_time"),
    "elapsed": ("elapsed", "elapsed_time"),
}
"""Field -> the names it goes by, the most telling first."""

TIMES = ("arrival", "abort", "timeout", "think", "elapsed", "delay")
LISTS = ("prefix_hashes", "prompt_ids", "joins")
TEXTS = ("session", "slo", "tenant", "program", "call", "parent")
REQUIRED = ("prompt_tokens", "output_tokens")

NS_PER_UNIT = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_UNIT = re.compile(r"_(s|sec|secs|seconds|ms|msec|millis|milliseconds|us|usec|micros|ns|nanos)$")
_SPELLED = {"sec": "s", "secs": "s", "seconds": "s", "msec": "ms", "millis": "ms", "milliseconds": "ms"} | {
    "usec": "us",
    "micros": "us",
    "nanos": "ns",
}


@dataclass(frozen=True)
class Field:
    """One thing that a trace holds, as this file calls it. unit: of a time, "" where the name tells none."""

    meaning: str
    column: str
    unit: str = ""


def plain(name: str) -> str:
    """The one form in which names are compared: `GeneratedTokens`, `Generated tokens` -> generated_tokens."""
    if len(name) > 100:
        return name
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def find(columns: Sequence[str]) -> dict[str, Field]:
    """Which column holds what, by name alone. Columns that mean nothing here are left out."""
    by_name: dict[str, tuple[str, str]] = {}
    for column in columns:
        name = plain(column)
        by_name.setdefault(name, (column, ""))
        if unit := _UNIT.search(name):
            by_name.setdefault(name[: unit.start()] + "|", (column, _SPELLED.get(unit[1], unit[1])))
    found = {}
    for meaning, names in NAMES.items():
        for name in names:
            match = by_name.get(name)
            if match is None and meaning in TIMES:
                match = by_name.get(name + "|")
            if match is not None:
                found[meaning] = Field(meaning, *match)
                break
    # Calls are named by whoever names their parents; any other file's chat_id is its session.
    if "parent" in found and "call" in found:
        if "session" in found and found["session"].column == found["call"].column:
            del found["session"]
    else:
        found.pop("parent", None)
        found.pop("call", None)
    if "delay" in found and ("session" not in found or "after_row" in found):
        del found["delay"]
    return found


def dialect(columns: Sequence[str]) -> str:
    """Which project's file this is, told by its column names; "" when it is nobody's in particular.

    A unit that somebody has put behind the name of the arrivals makes it no other file.
    """
    names = {plain(column) for column in columns}
    names |= {bare for name in names if (bare := _UNIT.sub("", name)) in NAMES["arrival"]}
    for kind, needed in DIALECTS.items():
        if needed <= names:
            return kind
    return ""


SAY_NOTHING_MORE = {
    "burstgpt": {"model", "total_tokens", "log_type"},
    "vidur": {"num_total_tokens", "pd_ratio"},
    "bailian": {"type"},
    "lengths": {"num_total_tokens", "total_tokens", "pd_ratio"},
}
"""Columns of a project's files, or of lengths alone, that follow from others or that no run here could use."""


def unused(columns: Sequence[str], found: Mapping[str, Field], kind: str) -> list[str]:
    """The columns that nothing was taken from; of logs of vLLM none, which hold what became of the requests."""
    if kind.startswith("vllm"):
        return []
    used = {field.column for field in found.values()}
    known = SAY_NOTHING_MORE.get(kind, set())
    return [column for column in columns if column and column not in used and plain(column) not in known]


DIALECTS = {
    "azure": {"timestamp", "context_tokens", "generated_tokens"},
    "burstgpt": {"timestamp", "request_tokens", "response_tokens"},
    "bailian": {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"},
    "mooncake": {"timestamp", "input_length", "output_length"},
    "vidur": {"arrived_at", "num_prefill_tokens", "num_decode_tokens"},
    "vllm": {"queued_ts", "input_toks", "output_toks"},
    "vllm_steps": {"arrival", "added", "prompt", "output", "first", "done"},
}
