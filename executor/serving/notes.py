"""What a live run says of its trace and settings before the work, as `simulator.settings_without_effect` does for a
simulated one.
"""

from __future__ import annotations

from executor.config import LiveConfig
from metrics.measures.slo import doubtful_bounds
from workloads.generating.shared_prefixes import caches_prefixes, what_prompts_share
from workloads.priorities import notes_on_priorities, notes_on_turns
from workloads.trace import Trace


def notes_of_live_run(config: LiveConfig, trace: Trace) -> list[str]:
    """The reader's notes, how prompts are known to begin alike where a cache looks for that, doubtful bounds."""
    notes = [*trace.notes, *(doubtful_bounds(config.slo) if config.slo else ())]
    notes += notes_on_priorities(trace, config.policy, config.knobs) + notes_on_turns(trace, config.policy)
    if not caches_prefixes(config.prefix_caching, config.knobs):
        return notes
    if config.prompts is not None:
        notes.append("prefix caching: equal beginnings are those of the lines of --prompts")
    elif shared := what_prompts_share(trace):
        notes.append(f"prefix caching: {shared}")
        if trace.prompt_ids is not None and trace.session is not None:
            notes.append(
                "prefix caching: later turns begin with the recorded answers, not with those that this model gives, so "
                "that blocks of answers are not found again (a simulation finds them)"
            )
    else:
        notes.append("prefix caching: nothing in the trace says that two prompts begin alike")
    return notes
