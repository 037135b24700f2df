"""Which acceptance makes an EAGLE head with four drafts slower, at one request a second and at saturation?

An 8B model on one H100, at most 128 requests at once. Prints, for each acceptance of a draft, throughput at saturation
and end-to-end latency at one request a second, both over those of the engine without drafts.
"""

from __future__ import annotations

from simulator import replay
from workloads import Trace, generate

ENGINE = {"policy": "vllm_v1", "gpu": "h100", "model": "llama-3.1-8b", "engine": "vllm:0.19", "max_num_seqs": 128}


def ratios(acceptance: float, flood: Trace, trickle: Trace) -> tuple[float, float]:
    """(throughput of a flood, E2E of a trickle) with drafts over those without."""
    speculating = {**ENGINE, "speculation": "eagle:4", "acceptance": str(acceptance)}
    tokens = [replay(flood, **settings).summary["output_tokens_per_s"] for settings in (speculating, ENGINE)]
    e2e = [replay(trickle, **settings).summary["e2e_s_mean"] for settings in (speculating, ENGINE)]
    return tokens[0] / tokens[1], e2e[0] / e2e[1]


def main(requests: int = 384) -> None:
    lengths = {"prompt": "fixed:512", "output": "fixed:256", "seed": 1}
    flood = generate(requests=requests, arrivals="poisson:2000", **lengths)
    trickle = generate(requests=60, arrivals="poisson:1", **lengths)
    print("acceptance  throughput at saturation  E2E at 1 request/s")
    for acceptance in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8):
        throughput, e2e = ratios(acceptance, flood, trickle)
        print(f"{acceptance:10.1f}  {throughput:24.2f}  {e2e:18.2f}")


if __name__ == "__main__":
    main()
