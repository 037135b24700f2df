"""Settings that a trace gives nothing to work with: they change nothing, and a run says so instead of seeming to."""

from __future__ import annotations

from simulator.config import ReplayConfig
from simulator.routers import router_class
from workloads import Trace


def settings_without_effect(config: ReplayConfig, trace: Trace) -> list[str]:
    """One sentence for each router, and for the prefix cache, that looks for what no request of `trace` has."""
    sessions = trace.session is not None and any(name is not None for name in trace.session)
    prefixes = trace.prefix_hashes is not None and any(len(hashes) for hashes in trace.prefix_hashes)
    present = {"session": sessions, "prefix_hashes": prefixes}
    roles = {str(pool.get("role", "serve")) for pool in config.pools}
    routers = [config.router] if config.replicas > 1 or config.pools or config.autoscale else []
    if "decode" in roles:
        routers.append(config.decode_router)
    notes = []
    for name in dict.fromkeys(routers):
        column = router_class(name).routes_by
        if column and not present.get(column, True):
            notes.append(
                f"router {name}: the trace has no {column}, so it deals every request by load alone "
                f"(a column {column} would be read; docs/workloads.md)"
            )
    if config.prefix_caching and not any(present.values()):
        notes.append("--prefix-caching: the trace has no prefix_hashes and no session, so no two prompts agree")
    return notes
