"""One registry of policies: built in, from other packages (entry point group `charioteer.policies`), or from a file.

A policy is named by its module here (`chunked`), by its entry point, or as `path/to/file.py:ClassName`. A file is run
only when it is named.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from policies.contract.policy import Policy, StatefulPolicy
from policies.edges.errors import PolicyError
from policies.edges.settings import LARGEST
from policies.edges.user_code import MODULES, place_in_file

if TYPE_CHECKING:
    from types import ModuleType

BUILT_IN: Mapping[str, str] = {
    "request_level": "policies.request_level:RequestLevel",
    "orca": "policies.orca:Orca",
    "prefill_priority": "policies.prefill_priority:PrefillPriority",
    "decode_maximal": "policies.decode_maximal:DecodeMaximal",
    "dynamic_chunk": "policies.dynamic_chunk:DynamicChunk",
    "chunked": "policies.chunked:Chunked",
    "vllm_v1": "policies.vllm_v1:VllmV1",
    "shortest_prompt_first": "policies.shortest_prompt_first:ShortestPromptFirst",
    "slo_aware": "policies.slo_aware:SloAware",
    "goodput_drafts": "policies.goodput_drafts:GoodputDrafts",
    "most_in_time": "policies.most_in_time:MostInTime",
    "predicted_sjf": "policies.fair.predicted_sjf:PredictedSjf",
    "weighted_fair": "policies.fair.weighted_fair:WeightedFair",
    "vtc": "policies.fair.vtc:Vtc",
    "program_fcfs": "policies.fair.program_fcfs:ProgramFcfs",
    "least_attained": "policies.fair.least_attained:LeastAttained",
}

ENTRY_POINT_GROUP = "charioteer.policies"

OLD_PROMISES = {
    "repeats": "decodes",
    "repeats_chunks": "chunks",
    "repeats_in_pipelines": "micro_batches",
    "keeps_running": "keeps_running",
}
"""How promises were stated before they were one object."""

LONGEST_S, LARGEST_FLOAT = 1e9, 1e18
"""Most seconds, which in nanoseconds still fit 64 bits, and the largest of any other number, that a knob may be."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """One knob of a policy: its name, type, default and what it is for. optional: it may be None ("auto" as text)."""

    name: str
    type: type
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False


def policy_names() -> list[str]:
    """Built-in policies in the order of their history, then those of other packages."""
    return [*BUILT_IN, *names_of_others(ENTRY_POINT_GROUP, BUILT_IN)]


def priorities_unused(name: str, knobs: Mapping[str, Any]) -> str:
    """Why a policy's runs do not follow the priorities that a trace has; "" where they do, or where nobody can know."""
    if name == "vllm_v1":
        if str(knobs.get("scheduling", "fcfs")) == "priority":
            return ""
        return "vllm_v1 serves in order of arrival; --scheduling priority follows the trace's priorities, as vLLM does"
    if name in BUILT_IN and name != "slo_aware":
        return f"{name} does not look at priorities; slo_aware does, and vllm_v1 with --scheduling priority"
    return ""


def policy_class(name: str) -> type[Policy]:
    """The class behind a name or `file.py:ClassName`; PolicyError says what is near if there is none."""
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(":")
        return _checked(getattr(importlib.import_module(module), cls), name)
    path, colon, cls = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _checked(class_from_file("policy", Path(path), cls), name)
    if (cls := class_of_another_package("policy", ENTRY_POINT_GROUP, name)) is not None:
        return _checked(cls, name)
    if name.endswith(".py") and Path(name).is_file():
        raise PolicyError(f"policy: found the file {name}, expected one of its classes, as {name}:ClassName")
    near = difflib.get_close_matches(name, policy_names(), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise PolicyError(
        f"policy: found {name!r}, expected one of {', '.join(policy_names())}, or path/to/file.py:ClassName{hint}"
    )


def knobs_of(cls: type[Policy]) -> dict[str, Knob]:
    """The knobs of a policy class, by name."""
    hints = get_type_hints(cls)
    knobs = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = field.default if field.default is not dataclasses.MISSING else None
        meta = field.metadata
        wanted = hints.get(field.name, type(default))
        kinds = [kind for kind in get_args(wanted) if kind is not NoneType]
        optional = len(kinds) == 1 and NoneType in get_args(wanted)
        knobs[field.name] = Knob(
            field.name,
            kinds[0] if optional else wanted,
            default,
            meta.get("help", ""),
            meta.get("least"),
            meta.get("most"),
            tuple(meta.get("choices", ())),
            optional,
        )
    return knobs


def make_policy(name: str, knobs: Mapping[str, Any] | None = None) -> Policy:
    """A policy from its name and knobs (values may be text, as a command line gives them).

    PolicyError for a knob that the policy does not have, a value of the wrong type or outside its range.
    """
    cls = policy_class(name)
    known = knobs_of(cls)
    values = {}
    for key, value in (knobs or {}).items():
        knob_name = key.replace("-", "_")
        knob = known.get(knob_name)
        if knob is None:
            has = ", ".join(known) or "none"
            # The one size that every policy has goes by another name where it is no knob.
            size = "; --token-budget bounds its batches" if knob_name == "chunk_size" else ""
            raise PolicyError(f"policy {name} has no knob {key!r}; its knobs: {has}{size}")
        values[knob.name] = knob_value(f"policy {name}", knob, value)
    try:
        return cls(**values)
    except PolicyError:
        raise
    except ValueError as error:  # a policy's own check of its knobs
        raise PolicyError(f"policy {name}: {error}") from error


def knob_value(owner: str, knob: Knob, value: Any) -> Any:
    """The value of a knob, which may come as text; PolicyError names the owner, the knob, found and expected."""
    wanted = knob.type
    text = str(value).strip()
    if knob.optional and (value is None or text.lower() == "auto"):
        return None
    try:
        if wanted is bool:
            converted: Any = {"true": True, "1": True, "yes": True, "on": True}.get(text.lower())
            if converted is None:
                converted = {"false": False, "0": False, "no": False, "off": False}[text.lower()]
        elif wanted is int:
            converted = int(text) if not isinstance(value, float) else _whole(value)
        elif wanted is float:
            converted = float(text)
        else:
            converted = text if isinstance(value, str) or wanted is str else value
    except (ValueError, KeyError, OverflowError):
        raise PolicyError(
            f"{owner}, knob {knob.name}: found {value!r}, expected {getattr(wanted, '__name__', wanted)}"
        ) from None
    if knob.choices and converted not in knob.choices:
        raise PolicyError(f"{owner}, knob {knob.name}: found {converted!r}, expected one of {', '.join(knob.choices)}")
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        if isinstance(converted, float) and not math.isfinite(converted):
            raise PolicyError(f"{owner}, knob {knob.name}: found {converted}, expected a finite number")
        largest = LARGEST if isinstance(converted, int) else LONGEST_S if knob.name.endswith("_s") else LARGEST_FLOAT
        if abs(converted) > largest:
            raise PolicyError(f"{owner}, knob {knob.name}: found {value!s:.40}, expected at most {largest:.0e}")
        if knob.least is not None and converted < knob.least:
            raise PolicyError(f"{owner}, knob {knob.name}: found {converted}, expected at least {knob.least}")
        if knob.most is not None and converted > knob.most:
            raise PolicyError(f"{owner}, knob {knob.name}: found {converted}, expected at most {knob.most}")
    return converted


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def names_of_others(group: str, ours: Container[str]) -> list[str]:
    """What other packages offer in a group of entry points, each name once, without those that are ours, sorted."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=group) if point.name not in ours})


def class_of_another_package(kind: str, group: str, name: str) -> Any:
    """What the entry point of that name stands for, None if there is none; its module is user code from now on.

    PolicyError where two packages offer the name, or where the one that does cannot be imported.
    """
    from importlib.metadata import entry_points

    # The same package may be found twice, in its checkout and installed.
    points = {point.value: point for point in entry_points(group=group) if point.name == name}
    if len(points) > 1:
        raise PolicyError(
            f"{kind}: found {name!r} in two packages ({' and '.join(sorted(points))}), expected one of that name; "
            f"uninstall one, or name its class as path/to/file.py:ClassName"
        )
    for point in points.values():
        MODULES.add(point.module)
        try:
            found = point.load()
        except (Exception, SystemExit) as error:  # a module that ends the program would look like success
            raise PolicyError(f"{kind} {name} ({point.value}): {type(error).__name__}: {error}") from error
        if found is None:
            raise PolicyError(f"{kind} {name} ({point.value}): found None, expected a class")
        return found
    return None


def class_from_file(kind: str, path: Path, cls: str) -> Any:
    """A class from a user's own file, which is run by this; kind: policy or router, for messages."""
    if not path.is_file():
        raise PolicyError(f"{kind} file {path}: no such file")
    module_name = f"charioteer_user_{kind}_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{kind} file {path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[module_name] = module
    MODULES.add(module_name)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = place_in_file(error, path)
        raise PolicyError(f"{kind} file {path}{line}: {type(error).__name__}: {error}") from error
    if not hasattr(module, cls):
        raise PolicyError(f"{kind} file {path}: found no class {cls!r} in it{_classes_of(module)}")
    return getattr(module, cls)


def _classes_of(module: ModuleType) -> str:
    """`, but ...`: the classes that a user's file defines itself."""
    own = [name for name, each in vars(module).items() if isinstance(each, type) and each.__module__ == module.__name__]
    return f", but {', '.join(own)}" if own else ", and no other"


def _checked(cls: Any, name: str) -> type[Policy]:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and callable(getattr(cls, "plan", None))):
        raise PolicyError(f"policy {name}: expected a frozen dataclass with a plan() method")
    if not issubclass(cls, Policy):
        raise PolicyError(f"policy {name}: expected a subclass of policies.Policy")
    if cls.plan in (Policy.plan, StatefulPolicy.plan):
        raise PolicyError(f"policy {name}: {cls.__name__} has no plan(): a policy defines one")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise PolicyError(
            f"policy {name}: {cls.__name__} may change; expected @dataclass(frozen=True), and what it remembers in a "
            "state (policies.StatefulPolicy)"
        )
    for old, new in OLD_PROMISES.items():
        if old in vars(cls):
            raise PolicyError(
                f"policy {name}: {old} is now promises = Promises({new}=True) (docs/how-to/write-a-policy.md)"
            )
    stateful = issubclass(cls, StatefulPolicy)
    if getattr(cls, "new_state", None) is StatefulPolicy.new_state:
        raise PolicyError(f"policy {name}: {cls.__name__} has no new_state(): a policy with a state makes it")
    arguments = ["self", "queues", "draft", "kv", "host", "now_ns", *(["state"] if stateful else [])]
    try:
        inspect.signature(cls.plan).bind(*arguments)
    except ValueError:
        pass  # compiled without a signature
    except TypeError as error:
        raise PolicyError(f"policy {name}: plan() has to take {', '.join(arguments)} ({error})") from None
    for field in dataclasses.fields(cls):
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise PolicyError(f"policy {name}: {field.name} has no default; a knob is made with knob(default, help)")
    for knob in knobs_of(cls).values():
        if knob.type not in (bool, int, float, str):
            raise PolicyError(
                f"policy {name}: {knob.name} is a {getattr(knob.type, '__name__', knob.type)}; a knob is a bool, int, "
                "float or str, and what a policy remembers goes into a state (policies.StatefulPolicy)"
            )
    return cls
