"""The trace in examples/trace.csv: ten minutes in the shape of a conversation service, made here and nowhere else.

Rate and quantiles are those of the Azure conversation trace of 2023 (19,366 requests, 5.53 per second, near-Poisson).
"""

from __future__ import annotations

from workloads.generating.generator import generate
from workloads.trace import Trace

PROMPT = "quantiles:0=2,1=29,5=181,10=207,25=396,50=1020,75=1189,90=2734,95=4083,99=4142,99.9=6212,100=14050"
OUTPUT = "quantiles:0=7,1=16,5=41,10=54,25=85,50=129,75=395,90=424,95=451,99=601,99.9=954,100=1000"


def example_trace() -> Trace:
    """Ten minutes at 5.5 requests/s; prompt P50 1020, P90 2734, P99 4142, output P50 129, P90 424, P99 601."""
    return generate(
        duration_s=600, arrivals="poisson:5.5", prompt=PROMPT, output=OUTPUT, stratified=True, seed=2023, name="trace"
    )
