"""What becomes of drafts in a simulated engine: how many are found for a request, and how many of them are accepted.

Acceptance is a curve: the chance that at least j drafts of a step are accepted, j = 1, 2, ... One number drawn from a
request's row and the place in its answer decides a step, so the same step of the same request goes the same way under
every policy and in every order of batches, and steps of one request are independent. Time is never divided by a mean.

A live run on the same requests may also say what happened at each place of each answer (`requests=RUN`): then that is
played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from policies import Batch, Speculation, Track
from policies.contract.speculation import MOST_DRAFTS
from policies.edges.settings import shown
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from workloads import Trace

FORMS = (
    "0.7 (each draft, where those before it were accepted), each=0.8,0.6 (by position), curve=0.8,0.5,0.3 (at least 1, "
    "2, 3 drafts), mean=1.5 (drafts accepted a step), curve=RUN or requests=RUN (a run folder), trace (its column "
    "acceptance); by SLO class: chat:0.8;code:0.5;0.7"
)


class Curve(NamedTuple):
    """at_least[j - 1]: the chance that j drafts or more are accepted, where so many are verified. Beyond its end it
    goes on falling by `ratio` a position."""

    at_least: tuple[float, ...]
    ratio: float

    @classmethod
    def each(cls, chances: Sequence[float]) -> Curve:
        """From the chance of every position where all before it were accepted; the last one holds beyond."""
        reached, at_least = 1.0, []
        for chance in chances:
            reached *= chance
            at_least.append(reached)
        return cls(tuple(at_least), chances[-1])

    @classmethod
    def reached(cls, shares: Sequence[float]) -> Curve:
        """From the chance that a position is reached and accepted; beyond the end as its last step."""
        before = shares[-2] if len(shares) > 1 else 1.0
        return cls(tuple(shares), shares[-1] / before if before else 0.0)

    @classmethod
    def mean(cls, accepted: float) -> Curve:
        """So many drafts in every step; between two whole numbers one of both is drawn, so that the mean is kept."""
        whole = int(accepted)
        return cls((1.0,) * whole + (accepted - whole,), 0.0)

    def accepted(self, drafts: int, chance: float) -> int:
        """Drafts accepted of so many, by a number drawn evenly from [0, 1)."""
        count = 0
        for share in self.at_least:
            if count >= drafts or chance >= share:
                return count
            count += 1
        share = self.at_least[-1]
        while count < drafts:
            share *= self.ratio
            if chance >= share:
                break
            count += 1
        return count


class Found(NamedTuple):
    """How many drafts a method finds: at_least[j - 1] is the chance of j or more. Empty: always as many as wanted."""

    at_least: tuple[float, ...] = ()

    def drafts(self, wanted: int, chance: float) -> int:
        if not self.at_least:
            return wanted
        return sum(1 for share in self.at_least[:wanted] if chance < share)


@dataclass(frozen=True)
class Acceptance:
    """The process of one run. by_class: curves of SLO classes that have their own; of_request: curves by row, from the
    trace; played: what a live run saw, (request, place in the answer) -> (drafts found, accepted)."""

    curve: Curve
    found: Found = field(default_factory=Found)
    by_class: Mapping[str, Curve] = field(default_factory=dict)
    of_request: Mapping[int, Curve] = field(default_factory=dict)
    played: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    seed: int = 0

    def curve_of(self, track: Track) -> Curve:
        request = track.request
        own = self.of_request.get(request.id)
        if own is not None:
            return own
        return self.by_class.get(request.slo, self.curve) if request.slo is not None else self.curve

    def decide(self, batch: Batch) -> None:
        """Say of a batch that is about to complete which of its drafts are accepted and how many are found next."""
        accepted: dict[int, int] = {}
        proposed: dict[int, int] = {}
        wanted = batch.shape.drafting
        for part in batch.verified:
            track, drafts = part.track, part.drafts
            if track.cohort is not part.cohort:
                continue
            row, place = track.request.id, track.delivered
            if part.placeholders or not drafts:
                taken = 0
            else:
                seen = self.played.get((row, place))
                if seen is not None:
                    taken = min(seen[1], drafts)
                else:
                    taken = self.curve_of(track).accepted(drafts, evenly(self.seed, row, place, 0))
            accepted[row] = taken
            proposed[row] = self._found(row, place + taken + 1, wanted)
        for track, epoch in batch.joins:
            if track.epoch == epoch:
                proposed[track.request.id] = self._found(track.request.id, track.delivered + 1, wanted)
        batch.accepted, batch.proposed = accepted, proposed

    def _found(self, row: int, place: int, wanted: int) -> int:
        seen = self.played.get((row, place))
        if seen is not None:
            return min(seen[0], wanted)
        if self.played and not self.found.at_least:
            return wanted
        return self.found.drafts(wanted, evenly(self.seed, row, place, 1))


def evenly(seed: int, row: int, place: int, purpose: int) -> float:
    """A number in [0, 1) from run, request, place in its answer and purpose: two rounds of the splitmix64 mixer."""
    mask = (1 << 64) - 1
    z = seed * 0xA0761D6478BD642F + row * 0x9E3779B97F4A7C15
    z = (z + place * 0xD1B54A32D192ED03 + purpose * 0x8EBC6AF09C88C6E3) & mask
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def make_acceptance(
    text: str | None, found: float | None, speculation: Speculation, trace: Trace, seed: int
) -> Acceptance:
    """The process that `--acceptance` describes. found: share of steps in which drafts are found, all of them then.

    Raises SimulationError for what makes no sense; without a text there is no honest default.
    """
    if text is None or not text.strip():
        raise SimulationError(f"--speculation {speculation} without --acceptance: expected {FORMS}")
    curve: Curve | None = None
    by_class: dict[str, Curve] = {}
    of_request: dict[int, Curve] = {}
    acceptance = Acceptance(Curve((0.0,), 0.0), seed=seed)
    shares = Found() if found is None or found >= 1 else Found((found,) * speculation.tokens)
    for entry in text.split(";"):
        name, colon, form = entry.strip().partition(":")
        if not colon:
            name, form = "", entry.strip()
        if form == "trace" and not name:
            of_request = _of_trace(trace)
            curve = curve or Curve.each((0.0,))
            continue
        key, equals, value = form.partition("=")
        if key == "requests" and equals and not name:
            acceptance = _played(Path(value), trace, seed)
            curve, shares = acceptance.curve, acceptance.found
            continue
        own, own_found = _curve(form)
        if name:
            by_class[name] = own
        else:
            curve = own
            if own_found is not None and found is None:
                shares = own_found
    if curve is None:
        if len(by_class) == 0:
            raise SimulationError(f"--acceptance: found {shown(text)}, expected {FORMS}")
        raise SimulationError(f"--acceptance: found {shown(text)}, expected an entry without a class for all others")
    if by_class:
        known = {slo for slo in trace.slo or () if slo is not None}
        for name in by_class:
            if name not in known:
                classes = ", ".join(sorted(known)) or "none"
                raise SimulationError(f"--acceptance: found class {shown(name)}, expected the trace's ({classes})")
    return Acceptance(curve, shares, by_class, of_request, acceptance.played, seed)


def _curve(form: str) -> tuple[Curve, Found | None]:
    """A curve from one form; with a run folder also how many drafts were found there."""
    key, equals, value = form.partition("=")
    if not equals:
        return Curve.each(_chances(form, form)), None
    if key == "each":
        return Curve.each(_chances(value, form)), None
    if key == "mean":
        accepted = _number(value, form)
        if not 0 <= accepted <= MOST_DRAFTS:
            raise SimulationError(f"--acceptance {form}: found {value}, expected 0 to {MOST_DRAFTS} drafts a step")
        return Curve.mean(accepted), None
    if key == "curve":
        if Path(value).is_dir():
            return _curve_of_run(Path(value))
        shares = _chances(value, form)
        if any(later > earlier for earlier, later in zip(shares, shares[1:])):
            raise SimulationError(f"--acceptance {form}: found shares that rise, expected none above the one before it")
        return Curve.reached(shares), None
    raise SimulationError(f"--acceptance: found {shown(form)}, expected {FORMS}")


def _chances(text: str, form: str) -> list[float]:
    chances = [_number(part, form) for part in text.split(",")]
    for chance in chances:
        if not 0 <= chance <= 1:
            raise SimulationError(f"--acceptance {form}: found {chance}, expected 0 to 1")
    return chances


def _number(text: str, form: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise SimulationError(f"--acceptance {form}: found {shown(text)}, expected {FORMS}") from None
    if number != number:
        raise SimulationError(f"--acceptance {form}: found {shown(text)}, expected a number")
    return number


def _of_trace(trace: Trace) -> dict[int, Curve]:
    if trace.acceptance is None:
        raise SimulationError(f"--acceptance trace: {trace.name} has no column acceptance (0 to 1 for every request)")
    return {row: Curve.each((chance,)) for row, chance in enumerate(trace.acceptance.tolist())}


def _curve_of_run(folder: Path) -> tuple[Curve, Found]:
    from metrics import read_run
    from metrics.run_folder.drafts import acceptance_curve, at_least, drafts_of_run

    run = read_run(folder)
    drafts = drafts_of_run(run)
    curve = acceptance_curve(drafts.verified, drafts.accepted)
    if not curve:
        raise SimulationError(f"--acceptance: {folder} verified no drafts, expected a run with speculation")
    most = int(run.column("iterations", "drafting").max())
    found = at_least(drafts.verified, drafts.verified * 0 + most, most)
    return Curve.reached(curve), Found(tuple(found))


def _played(folder: Path, trace: Trace, seed: int) -> Acceptance:
    from metrics import read_run
    from metrics.run_folder.drafts import drafts_of_run

    curve, found = _curve_of_run(folder)
    run = read_run(folder)
    prompts = dict(zip(run.column("requests", "request").tolist(), run.column("requests", "prompt_tokens").tolist()))
    drafts = drafts_of_run(run)
    played: dict[tuple[int, int], tuple[int, int]] = {}
    columns = (column.tolist() for column in (drafts.request, drafts.position, drafts.verified, drafts.accepted))
    for row, place, verified, accepted in zip(*columns):
        if row >= len(trace):
            continue  # that run served more requests
        if prompts.get(row) != int(trace.prompt_tokens[row]):
            raise SimulationError(
                f"--acceptance requests={folder}: its request {row} has {prompts.get(row)} prompt tokens, which is not "
                f"that of {trace.name}; curve={folder} takes the curve alone"
            )
        # A step that begins between two of that run's finds what was left of the earlier one's draft.
        for later in range(accepted + 1):
            played.setdefault((row, place + later), (verified - later, accepted - later))
        played[row, place] = verified, accepted
    return Acceptance(curve, found, played=played, seed=seed)
