"""GPU facts against the collected table, and a user's own file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from profiler.errors import ProfileError
from profiler.specs.hardware import hardware_names, load_hardware
from tests.shared_data import ORIGINALS

TABLE = ORIGINALS / "hardware.csv"
ROW_OF = {
    "h100": "H100-SXM",
    "h200": "H200-SXM",
    "a100": "A100-80GB-SXM",
    "a100-40gb": "A100-40GB-SXM",
    "a6000": "A6000",
    "a40": "A40",
    "l40s": "L40S",
    "rtx4090": "RTX4090",
    "rtxpro6000": "RTX-PRO-6000-Blackwell-Server",
    "b200": "B200-HGX",
}


@pytest.mark.parametrize("name", ROW_OF)
def test_facts_equal_the_collected_table(name: str) -> None:
    with TABLE.open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["gpu"] == ROW_OF[name])
    gpu = load_hardware(name)
    assert gpu.peak("bf16") / 1e12 == float(row["bf16_dense_tflops"].split()[0])
    assert gpu.memory_bandwidth / 1e9 == float(row["memory_bw_GBps"])
    assert 2 * gpu.link_bandwidth / 1e9 == float(row["gpu_link_GBps_bidirectional"])
    nominal = float(row["capacity_GB_nominal"])
    assert 0.93 * nominal * 1e9 < gpu.memory_bytes <= nominal * 2**30


def test_the_tensor_cores_of_every_gpu_fit_its_processors_at_a_plausible_clock() -> None:
    """FLOPs per processor and cycle are fixed by design (halved on GeForce): the peak implies the boost clock."""
    per_cycle = {"h": 4096, "a1": 2048, "a": 1024, "l": 1024, "r": 1024, "rtx4": 512, "b": 8192}
    for name in hardware_names():
        gpu = load_hardware(name)
        key = max((key for key in per_cycle if name.startswith(key)), key=len)
        assert 1.3e9 < gpu.peak("bfloat16") / (gpu.sms * per_cycle[key]) < 2.7e9, name


def test_a_file_adds_a_gpu_or_overrides_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "peak_flops = { bf16 = 1e14 }\nmemory_bytes = 24e9\nmemory_bandwidth = 1e12\nsms = 80\nlink_bandwidth = 32e9\n"
    )
    gpu = load_hardware(path)
    assert (gpu.name, gpu.peak("bfloat16"), gpu.remembered) == ("mine", 1e14, ())
    path.write_text('[slow]\nbase = "h100"\nmemory_bandwidth = 2e12\n[fast]\nbase = "h100"\n')
    slow = load_hardware(f"{path}:slow")
    assert (slow.memory_bandwidth, slow.sms, slow.name) == (2e12, 132, "slow")
    with pytest.raises(ProfileError, match="say which"):
        load_hardware(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[x]\nbase = "h100"\nmemory_bandwith = 1', "unknown key 'memory_bandwith'"),
        ('[x]\nbase = "h1000"', "base: found 'h1000'"),
        ('[x]\nbase = "h100"\nmemory_bandwidth = -1', "memory_bandwidth: found -1"),
        ('[x]\nbase = "h100"\nmemory_bandwidth = nan', "memory_bandwidth: found nan"),
        ("[x]\nsms = 4", "missing peak_flops"),
        ("[x", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=says):
        load_hardware(path)


def test_unknown_names_and_rates_are_explained() -> None:
    with pytest.raises(ProfileError, match="did you mean h100"):
        load_hardware("h1000")
    with pytest.raises(ProfileError, match="no peak rate for float8"):
        load_hardware("a100").peak("fp8")
    assert load_hardware("RTX 4090").name == "rtx4090"
    assert load_hardware("a100-80gb").name == "a100"
