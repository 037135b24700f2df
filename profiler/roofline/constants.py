"""The few numbers that the roofline needs and specifications do not give, each with its source.

`python -m profiler rates` prints the measurements behind them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from profiler.errors import ProfileError
from profiler.specs.hardware import Hardware


@dataclass(frozen=True)
class RooflineConstants:
    """What specifications do not say. Each with its source or reason; docs/concepts/costs.md says how they were read.

    matmul_efficiency: large bfloat16 GEMMs (m >= 2048, n, k >= 4096) reach 0.90 (A100), 0.81 (H100), 0.79 (H200) of the
        dense peak at the median in NVIDIA aiconfigurator's kernel tables.
    memory_efficiency: aiconfigurator's own correction of peak bandwidth (systems yaml: 0.8 on all three).
    attention_efficiency: FlashAttention on prompts of 4096 tokens and more reaches 0.55 to 0.585 of peak there; its
        authors state 0.50 to 0.73 on A100.
    kv_efficiency: decode attention that reads over 100 MB reaches 0.63 to 0.76 of peak bandwidth there (paged gather).
    link_efficiency: all-reduces of 1 GB over NVLink reach 0.66 to 0.76 of the ring bound on A100 there.
    kernel_ns: aiconfigurator's constant latency of a memory-bound kernel; its smallest GEMMs take 2.6 to 4.5 us.
    all_reduce_ns: its small all-reduces take 4.3 to 6.3 us over NVLink inside a CUDA graph; send_ns: its point-to-point
        latency.
    pcie_all_reduce_ns, pcie_link_efficiency: without NVLink. NCCL all-reduces of two RTX PRO 6000 over PCIe 5, in CUDA
        graphs, take 12.7 us at 4 KB, 41 at 1 MB and 587 at 20 MB (LLMServingSim's hardware.yaml, 24 sizes): 13.5 us
        and 0.57 of the link fit all of them within 12 %, from 1 MB within 6 %.
    staged_all_reduce_ns, staged_link_efficiency: where GPUs do not reach each other's memory, so that every byte goes
        through the host's: 12 us + bytes / 16 GB/s on PCIe 5 x16, CALIBRATED on the one run known of such a node (vLLM
        0.19, Qwen3-32B on two RTX PRO 6000), which therefore proves nothing about it.
    host_*: scheduling and output handling per step in logs of real vLLM (CPU build, one Python process): linear fits
        over four logs give 55 to 93 us + 9 to 18 us a sequence, and 31 to 68 us + 6 to 11 us a sampled sequence.
    sampler_bytes: a logit is read in 16 bits, written and read twice in 32 (temperature or argmax, softmax).
    """

    matmul_efficiency: float = 0.80
    memory_efficiency: float = 0.80
    attention_efficiency: float = 0.55
    kv_efficiency: float = 0.70
    link_efficiency: float = 0.75
    kernel_ns: float = 3_000.0
    all_reduce_ns: float = 5_000.0
    pcie_all_reduce_ns: float = 13_500.0
    pcie_link_efficiency: float = 0.57
    staged_all_reduce_ns: float = 12_000.0
    staged_link_efficiency: float = 0.25
    send_ns: float = 10_000.0
    host_before_ns: float = 65_000.0
    host_before_per_sequence_ns: float = 12_000.0
    host_after_ns: float = 40_000.0
    host_after_per_sample_ns: float = 8_000.0
    sampler_bytes: float = 18.0

    def collective(self, hardware: Hardware) -> tuple[float, float]:
        """Of a collective on the card's own link: ns before its first byte, and bytes per ns after it."""
        if not hardware.p2p:
            through_host = hardware.host_bandwidth or hardware.link_bandwidth
            return self.staged_all_reduce_ns, through_host * self.staged_link_efficiency / 1e9
        if hardware.link.startswith("NVLink"):
            return self.all_reduce_ns, hardware.link_bandwidth * self.link_efficiency / 1e9
        return self.pcie_all_reduce_ns, hardware.link_bandwidth * self.pcie_link_efficiency / 1e9

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if not 0 <= value < float("inf") or (key.endswith("efficiency") and not 0 < value <= 1):
                raise ProfileError(f"roofline constant {key}: found {value!r}")
