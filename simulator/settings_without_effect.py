"""Settings that a trace gives nothing to work with: they change nothing, and a run says so instead of seeming to."""

from __future__ import annotations

from metrics.measures.slo import doubtful_bounds
from simulator.config import ReplayConfig
from simulator.routers import router_class
from workloads import Trace
from workloads.generating.shared_prefixes import caches_prefixes, what_prompts_share
from workloads.priorities import notes_on_priorities


def notes_of_run(config: ReplayConfig, trace: Trace) -> list[str]:
    """All that a run of this config has to say of its trace and its settings, the reader's notes first."""
    doubtful = doubtful_bounds(config.slo) if config.slo else []
    shared = what_prompts_share(trace) if caches_prefixes(config.prefix_caching, config.knobs) else ""
    told = [f"prefix caching: {shared}"] if shared else []
    return list(dict.fromkeys([*trace.notes, *told, *settings_without_effect(config, trace), *doubtful]))


def settings_without_effect(config: ReplayConfig, trace: Trace) -> list[str]:
    """One sentence for each router, and for the prefix cache, that looks for what no request of `trace` has."""
    sessions = trace.session is not None and any(name is not None for name in trace.session)
    shared = what_prompts_share(trace)
    present = {"session": sessions, "prefix_hashes": bool(shared)}
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
    policies = {str(pool["policy"]): pool for pool in config.pools if "policy" in pool}
    for policy, knobs in {config.policy: config.knobs, **policies}.items():
        notes += notes_on_priorities(trace, policy, knobs)
    if caches_prefixes(config.prefix_caching, config.knobs) and not shared:
        notes.append(
            "--prefix-caching: the trace has no prefix_hashes, no prompt_ids, and no session whose prompts hold it so "
            "far, so no two prompts agree"
        )
    return notes
