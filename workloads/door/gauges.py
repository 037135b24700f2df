"""What /metrics shows: vLLM's names, labels and bucket edges (vllm/v1/metrics/loggers.py, 0.32), so that dashboards,
gateways and autoscalers written for it read this server too, and two of our own on how late things were.

Times are those of the engine: what a client waits beyond them is the wire's (`charioteer:wire_lag_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from policies.work.request import Ns
from workloads.door.asks import Wanted
from workloads.door.contract import Ended, Lateness, Load

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = tuple(1 << power for power in (0, *range(3, 15)))
SMALL_COUNTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FINISHED = {"finished": "length", "aborted": "abort", "failed": "error", "rejected": "error"}


class Gauges:
    """The registry of one door. loads: the replicas' state, asked when somebody looks."""

    def __init__(self, model: str, loads: Callable[[], Sequence[Load]], longest: int, clock: Lateness) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry(auto_describe=True)
        self._model, self._loads = model, loads
        self._labels: dict[tuple[int, int, tuple[str, ...]], Any] = {}
        self.wire = Lateness()
        self._clock = clock
        self.registry.register(self)
        tokens = tuple(_one_two_five(longest))

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(name, text, ("model_name", "engine", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Any:
            return Histogram(name, text, ("model_name", "engine"), registry=self.registry, buckets=tuple(buckets))

        self._prompt_tokens = counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._prompt_cached = counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.")
        self._generated = counter("vllm:generation_tokens", "Number of generation tokens processed.")
        self._success = counter("vllm:request_success", "Requests that have ended, by how.", "finished_reason")
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of requests not admitted, by reason.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens per engine step.", ITERATION_TOKENS)
        self._of_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._of_answer = histogram("vllm:request_generation_tokens", "Output tokens of a request.", tokens)
        self._most = histogram("vllm:request_max_num_generation_tokens", "Most output tokens asked for.", tokens)
        self._asked = histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", tokens)
        self._n = histogram("vllm:request_params_n", "The n of a request.", SMALL_COUNTS)
        self._computed = histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not cached.", tokens)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", BETWEEN_TOKENS_S)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between two tokens of a request.", BETWEEN_TOKENS_S
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to admission.", REQUEST_S)
        self._inference = histogram("vllm:request_inference_time_seconds", "Admission to last token.", REQUEST_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Admission to first token.", REQUEST_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "First to last token.", REQUEST_S)
        self._preempted = histogram("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS)
        for number in range(max(1, len(loads()))):
            for family in (self._prompt_tokens, self._generated, self._iteration, self._ttft, self._itl, self._e2e):
                self._of(family, number)

    def _of(self, family: Any, replica: int, *more: str) -> Any:
        """A family's child of one replica, looked up once."""
        key = (id(family), replica, more)
        child = self._labels.get(key)
        if child is None:
            child = self._labels[key] = family.labels(self._model, str(max(0, replica)), *more)
        return child

    def collect(self) -> Iterable[Metric]:
        """What is read off the engine at the moment somebody asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        loads, names = self._loads(), ("model_name", "engine")
        for name, text, kind, value in (
            ("vllm:num_requests_running", "Requests in execution batches.", GaugeMetricFamily, "running"),
            ("vllm:num_requests_waiting", "Requests waiting to be processed.", GaugeMetricFamily, "waiting"),
            ("vllm:kv_cache_usage_perc", "KV-cache usage; 1 means 100 percent.", GaugeMetricFamily, "kv_usage"),
            ("vllm:num_preemptions", "Preemptions.", CounterMetricFamily, "preemptions"),
            ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", CounterMetricFamily, "prefix_queries"),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", CounterMetricFamily, "prefix_hits"),
        ):
            family = kind(name, text, labels=names)
            for number, load in enumerate(loads):
                family.add_metric((self._model, str(number)), getattr(load, value))
            yield family
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool.", labels=("engine", "block_size", "num_gpu_blocks", "model_name")
        )
        for number, load in enumerate(loads):
            info.add_metric((str(number), str(load.block_size), str(load.blocks), self._model), 1)
        yield info
        for name, text, late in (
            ("charioteer:wire_lag_seconds", "From a token's time to its writing.", self.wire),
            ("charioteer:clock_lag_seconds", "From a moment's time to its playing.", self._clock),
        ):
            yield SummaryMetricFamily(name, text, late.count, late.total_ns / 1e9)
            worst = GaugeMetricFamily(name.replace("_seconds", "_quantile_seconds"), text, labels=("quantile",))
            for share in (0.5, 0.99):
                worst.add_metric((str(share),), late.quantile_s(share))
            worst.add_metric(("1",), late.worst_ns / 1e9)
            yield worst

    def describe(self) -> Iterable[Metric]:
        """Nothing before the registry asks for values: the engine need not be there yet."""
        return ()

    def batch(self, replica: int, tokens: int) -> None:
        """A batch of so many tokens has completed."""
        self._of(self._iteration, replica).observe(tokens)

    def gap(self, replica: int, since_ns: Ns) -> None:
        """A token came so long after the one before it."""
        self._of(self._itl, replica).observe(since_ns / 1e9)

    def generated(self, replica: int, tokens: int) -> None:
        self._of(self._generated, replica).inc(tokens)

    def refused(self, reason: str) -> None:
        self._rejections.labels(self._model, reason).inc()

    def ended(self, end: Ended, wanted: Wanted, finish: str) -> None:
        """A request has ended; finish: stop or length where it finished."""
        at = end.replica
        why = finish if end.status == "finished" and finish else FINISHED[end.status]
        self._of(self._success, at, why).inc()
        if end.status == "rejected":
            return
        prompt = len(wanted.prompt_ids)
        if end.first_token_ns >= 0:
            self._of(self._prompt_tokens, at).inc(prompt)
            self._of(self._prompt_cached, at).inc(end.cached_tokens)
            self._of(self._computed, at).observe(prompt - end.cached_tokens)
        for family, value in (
            (self._of_prompt, prompt),
            (self._of_answer, end.output_tokens),
            (self._most, wanted.max_tokens),
            (self._asked, wanted.max_tokens),
            (self._n, 1),
            (self._preempted, end.preemptions),
        ):
            self._of(family, at).observe(value)
        self._of(self._e2e, at).observe((end.finished_ns - end.arrival_ns) / 1e9)
        if end.admitted_ns >= 0:
            self._of(self._queue, at).observe((end.admitted_ns - end.arrival_ns) / 1e9)
            self._of(self._inference, at).observe((end.finished_ns - end.admitted_ns) / 1e9)
        if end.first_token_ns >= 0:
            decode_s = (end.finished_ns - end.first_token_ns) / 1e9
            self._of(self._prefill, at).observe((end.first_token_ns - end.admitted_ns) / 1e9)
            self._of(self._decode, at).observe(decode_s)
            if end.output_tokens > 1:
                self._of(self._tpot, at).observe(decode_s / (end.output_tokens - 1))

    def first(self, replica: int, ttft_ns: Ns) -> None:
        self._of(self._ttft, replica).observe(ttft_ns / 1e9)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self.registry))


def _one_two_five(most: int) -> Iterable[float]:
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > most:
                return
            yield step * scale
        scale *= 10
