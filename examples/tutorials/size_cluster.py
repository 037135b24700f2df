"""Tutorial 3: how many GPUs keep an objective? `python examples/tutorials/size_cluster.py`."""

from simulator import replay
from workloads import generate

SLO = "ttft_p99=1,tbt_p99=0.1"
MOST = 8


def main(requests_per_s: float = 40.0, requests: int = 600) -> int:
    """Adds replicas until 99 % of the requests meet the objective; returns how many it took."""
    load = generate(
        requests=requests,
        arrivals=f"poisson:{requests_per_s}",
        prompt="uniform:200,3000",
        output="uniform:50,300",
        seed=1,
    )
    for replicas in range(1, MOST + 1):
        run = replay(
            load, policy="chunked", chunk_size=512, model="llama-3.1-8b", gpu="h100", replicas=replicas, slo=SLO
        )
        met = run.summary["slo_attainment"]
        print(f"{replicas} x H100: {met:6.1%} of the requests within {SLO}")
        if met >= 0.99:
            return replicas
    raise SystemExit(f"{MOST} replicas do not hold {SLO} at {requests_per_s:g} requests/s: raise MOST")


if __name__ == "__main__":
    main()
