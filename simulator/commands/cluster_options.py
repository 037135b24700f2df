"""The flags about replicas, routers, pools, KV transfers, failures and scaling, and how they become config fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from simulator.errors import SimulationError

CLUSTER = "Cluster"


def _option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=CLUSTER)


Replicas = Annotated[int, _option("--replicas", "Equal replicas of the engine.")]
Router = Annotated[str, _option("--router", "Who gets a request: a router's name, or path/to/file.py:ClassName.")]
RouterKnob = Annotated[list[str] | None, _option("--router-knob", "A knob of the router, as spill=8; repeatable.")]
PoolText = Annotated[
    list[str] | None,
    _option("--pool", "Replicas of one kind (serve, prefill or decode), as role=decode,replicas=2; repeatable."),
]
DecodeRouter = Annotated[str, _option("--decode-router", "Who decodes a prompt that is done (with decode pools).")]
DecodeRouterKnob = Annotated[list[str] | None, _option("--decode-router-knob", "A knob of that router; repeatable.")]
KVBandwidth = Annotated[
    float | None, _option("--kv-bandwidth", "Bytes/s of a device's NIC for KV transfers; the GPU's own by default.")
]
KVLatency = Annotated[float, _option("--kv-latency", "Seconds of latency of a KV transfer.")]
LayerwiseKV = Annotated[bool, _option("--layerwise-kv", "Send a layer's KV while the next layer is computed.")]
Fail = Annotated[
    list[str] | None, _option("--fail", "REPLICA@SECONDS dies, REPLICA@SECONDS+SECONDS comes back; repeatable.")
]
OnFailure = Annotated[str, _option("--on-failure", "requeue the requests of a dead replica, or fail them.")]
Autoscale = Annotated[
    str | None, _option("--autoscale", "Grow and shrink a pool, as most=8,by=queue,startup_s=60 (docs/clusters.md).")
]
Afd = Annotated[
    str | None, _option("--afd", "Attention and FFN on devices of their own, as attention=4,ffn=4 (docs/clusters.md).")
]
PPLink = Annotated[
    str, typer.Option("--pp-link", help="Stages share a node (link) or not (network).", rich_help_panel="Pipeline")
]

FLAGS: dict[str, tuple[Any, Any]] = {
    "replicas": (Replicas, 1),
    "router": (Router, "least_outstanding_requests"),
    "router_knob": (RouterKnob, None),
    "pool": (PoolText, None),
    "decode_router": (DecodeRouter, "least_kv"),
    "decode_router_knob": (DecodeRouterKnob, None),
    "kv_bandwidth": (KVBandwidth, None),
    "kv_latency": (KVLatency, 10e-6),
    "layerwise_kv": (LayerwiseKV, False),
    "fail": (Fail, None),
    "on_failure": (OnFailure, "requeue"),
    "autoscale": (Autoscale, None),
    "afd": (Afd, None),
    "pp_link": (PPLink, "link"),
}
"""name -> (annotation, default), as `simulator.commands.options.SHARED` has them."""


def as_config(flags: dict[str, Any]) -> dict[str, Any]:
    """Given flags with the cluster's among them turned into fields of ReplayConfig."""
    from simulator.cluster.pools import parse_pool

    values = dict(flags)
    for flag, field in (("router_knob", "router_knobs"), ("decode_router_knob", "decode_router_knobs")):
        if flag in values:
            values[field] = _pairs("--" + flag.replace("_", "-"), values.pop(flag))
    if "pool" in values:
        values["pools"] = tuple(parse_pool(text) for text in values.pop("pool"))
    if "kv_latency" in values:
        values["kv_latency_s"] = values.pop("kv_latency")
    if "fail" in values:
        values["failures"] = tuple(values.pop("fail"))
    for table in ("autoscale", "afd"):
        if table in values:
            values[table] = _pairs(f"--{table}", values[table].split(","))
    return values


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.strip().partition("=")
        if not (key and equals and value):
            raise SimulationError(f"{flag}: found {text.strip()!r}, expected key=value")
        pairs[key.replace("-", "_")] = value
    return pairs
