"""Five common jobs of a language model, as workloads with targets: where to start when there is no trace yet.

Lengths and gaps are measured quantiles of public traces where one exists; `source` says which, and gives the reason
for what was not measured. Rates are those of the trace, of a service of unknown size: scale them to yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workloads.generating.example import OUTPUT as AZURE_CONV_OUTPUT
from workloads.generating.example import PROMPT as AZURE_CONV_PROMPT
from workloads.generating.generator import generate
from workloads.trace import Trace, TraceError


@dataclass(frozen=True)
class Preset:
    """One job: how its requests look and what its users expect.

    rate: requests per second; gap_cv: coefficient of variation of the gaps (1 is Poisson). prompt, output: see
    workloads.generating.lengths; pd_ratio: prompt tokens per output token, instead of output. slo: metric_percentile
    -> seconds.
    """

    name: str
    rate: float
    prompt: str
    slo: Mapping[str, float]
    source: str
    output: str = "fixed:1"
    pd_ratio: float | None = None
    gap_cv: float = 1.0

    def trace(self, duration_s: float = 300.0, rate: float | None = None, seed: int = 0) -> Trace:
        """The preset's requests over a duration, at its own rate or another one (requests per second)."""
        rate = self.rate if rate is None else rate
        arrivals = f"poisson:{rate}" if self.gap_cv == 1 else f"gamma:{rate},{self.gap_cv}"
        return generate(
            duration_s=duration_s,
            arrivals=arrivals,
            prompt=self.prompt,
            output=self.output,
            pd_ratio=self.pd_ratio,
            stratified=True,
            seed=seed,
            name=self.name,
        )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "summarization",
            rate=2.0,
            prompt="quantiles:0=1,10=1242,25=1986,50=2730,75=3370,90=3702,95=3813,99=3934,100=4054",
            output="quantiles:0=5,10=78,25=115,50=167,75=242,90=372,95=737,99=3273,100=4056",
            slo={"ttft_p99": 10.0, "tbt_p99": 0.2},
            source=(
                "Lengths: 28,257 arXiv articles and abstracts in Llama-2 tokens (published with Vidur). Rate: a round "
                "number. Targets: nobody waits for the first word of a summary as for an answer in a chat; it is then "
                "read as it comes, at reading speed."
            ),
        ),
        Preset(
            "chat",
            rate=5.5,
            prompt=AZURE_CONV_PROMPT,
            output=AZURE_CONV_OUTPUT,
            slo={"ttft_p99": 2.0, "tbt_p99": 0.2},
            source=(
                "Lengths, rate and near-Poisson gaps: Azure conversation trace, 2023 (19,366 requests). Targets: those "
                "of MLPerf Inference for Llama-2-70B in the server scenario (2 s, 200 ms), taken here on every gap."
            ),
        ),
        Preset(
            "translation",
            rate=4.0,
            prompt="lognormal:300,0.7,20,4096",
            pd_ratio=1.0,
            slo={"ttft_p99": 1.0, "tbt_p99": 0.1},
            source=(
                "Not measured. A translation is about as long as its text, so P:D is 1; texts from a sentence to a few "
                "pages. Targets: the reader has the original before him and waits for the whole, so twice chat's speed."
            ),
        ),
        Preset(
            "code",
            rate=2.57,
            gap_cv=3.2,
            prompt="quantiles:0=3,1=17,5=75,10=147,25=578,50=1469,75=2745,90=5194,95=7315,99=7436,100=7437",
            output="quantiles:0=6,5=6,10=7,25=9,50=13,75=24,90=55,95=90,99=252,99.9=831,100=1899",
            slo={"ttft_p99": 0.45, "tbt_p99": 0.04},
            source=(
                "Lengths and rate: Azure code trace, 2023 (8,819 requests). Gaps: the median CV in its minutes, 3.2 "
                "(over the hour it is 13, for some minutes have no request). Targets: the interactive ones of MLPerf "
                "Inference 5.0 (450 ms, 40 ms), since a completion must come before the next key."
            ),
        ),
        Preset(
            "reasoning",
            rate=0.95,
            prompt="quantiles:0=17,1=37,5=61,10=121,25=189,50=261,75=279,90=293,95=305,99=660,100=1056",
            output="quantiles:0=64,1=167,5=254,10=316,25=411,50=552,75=829,90=1386,95=1886,99=3448,100=28757",
            slo={"ttft_p99": 5.0, "tbt_p99": 0.08},
            source=(
                "Lengths, rate and gaps: four DeepSeek-R1 clients of ServeGen, drawn over a day by our reader; "
                "the rate is that of the ten-minute windows with more than 100 requests, and gaps within them are "
                "near-Poisson. Targets: thinking is not read, so the first token may wait; the answer should not."
            ),
        ),
    )
}
"""Name -> preset."""


def preset(name: str) -> Preset:
    """The preset of this name; raises TraceError with the names there are."""
    if name not in PRESETS:
        raise TraceError(f"preset: found {name[:40]!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
