"""Settings that a trace gives nothing to work with: they change nothing, and a run says so instead of seeming to."""

from __future__ import annotations

from metrics.measures.slo import doubtful_bounds
from policies import Speculation
from policies.registry import knobs_of, make_policy, policy_class
from profiler import load_hardware
from simulator.config import ReplayConfig
from simulator.routers import router_class
from workloads import Trace
from workloads.generating.shared_prefixes import caches_prefixes, what_prompts_share
from workloads.priorities import notes_on_priorities, notes_on_turns


def notes_of_run(config: ReplayConfig, trace: Trace) -> list[str]:
    """All that a run of this config has to say of its trace and its settings, the reader's notes first."""
    doubtful = doubtful_bounds(config.slo) if config.slo else []
    shared = what_prompts_share(trace) if caches_prefixes(config.prefix_caching, config.knobs) else ""
    told = [f"prefix caching: {shared}"] if shared else []
    without = settings_without_effect(config, trace)
    return list(dict.fromkeys([*trace.notes, *told, *without, *doubtful, *planning_ahead(config)]))


def planning_ahead(config: ReplayConfig) -> list[str]:
    """Whether engines whose version decides that plan ahead of the running batch: one sentence for each."""
    notes = []
    for pool in config.pools or ({},):
        name, gpu = str(pool.get("policy", config.policy)), str(pool.get("gpu", config.gpu))
        stages = int(pool.get("pp", config.pp))
        known = knobs_of(policy_class(name))
        if "engine_version" not in known:
            continue
        own = {**config.knobs, **pool}
        policy = make_policy(name, {key: own[key] for key in known if key in own})
        version = getattr(policy, "engine_version", "")
        if getattr(policy, "async_scheduling", None) is not None:
            continue
        on_gpu = load_hardware(gpu).processor == "gpu"
        method = "" if config.speculation is None else Speculation.parse(config.speculation).method
        if policy.plans_ahead(on_gpu=on_gpu, stages=stages, speculation=method):
            notes.append(f"policy {name}: plans ahead of the running batch, as version {version} does; --sync does not")
        elif stages > 1 and policy.plans_ahead(on_gpu=True, stages=1):
            notes.append(
                f"policy {name}: plans one batch a stage; from 0.16 on the engine also plans ahead in pipelines, which "
                "is not simulated"
            )
    return notes


def settings_without_effect(config: ReplayConfig, trace: Trace) -> list[str]:
    """One sentence for each router, and for the prefix cache, that looks for what no request of `trace` has."""
    sessions = trace.session is not None and any(name is not None for name in trace.session)
    shared = what_prompts_share(trace)
    present = {"session": sessions, "prefix_hashes": bool(shared)}
    roles = {str(pool.get("role", "serve")) for pool in config.pools}
    routers = [config.router] if config.replicas > 1 or config.pools or config.autoscale else []
    if "decode" in roles:
        routers.append(config.decode_router)
    if config.dp > 1 or any(int(pool.get("dp", 1)) > 1 for pool in config.pools):
        routers.append(config.rank_router)
    notes = []
    for name in dict.fromkeys(routers):
        column = router_class(name).routes_by
        if column and not present.get(column, True):
            notes.append(
                f"router {name}: the trace has no {column}, so it deals every request by load alone "
                f"(a column {column} would be read; docs/concepts/workloads.md)"
            )
    policies = {str(pool["policy"]): pool for pool in config.pools if "policy" in pool}
    for policy, knobs in {config.policy: config.knobs, **policies}.items():
        notes += notes_on_priorities(trace, policy, knobs) + notes_on_turns(trace, policy)
    if caches_prefixes(config.prefix_caching, config.knobs) and not shared:
        notes.append(
            "--prefix-caching: the trace has no prefix_hashes, no prompt_ids, and no session whose prompts hold it so "
            "far, so no two prompts agree"
        )
    return notes
