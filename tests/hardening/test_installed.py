"""The package without the repository around it: a wheel has its data, runs from anywhere, and goes away whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "workloads", "metrics", "profiler", "simulator", "executor", "experiments")
DATA = (
    "profiler/data/models.toml",
    "profiler/data/hardware.toml",
    "profiler/data/fitted/h100.json",
    "profiler/data/fitted/h100.npz",
    "profiler/data/facts/vllm_runs/RTX4090/Llama-3.1-8B/meta.json",
    "policies/py.typed",
)


def call(*words: object, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-2000:]
    return done  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the packages and what describes them, through an sdist-like copy, without the network."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", ".*")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / "source" / name)
    call(
        sys.executable,
        "-c",
        "import setuptools.build_meta as b; b.build_sdist('sdist'); b.build_wheel('dist')",
        cwd=_made(folder),
    )
    return next((folder / "source" / "dist").glob("*.whl"))


def _made(folder: Path) -> Path:
    for name in ("sdist", "dist"):
        (folder / "source" / name).mkdir()
    return folder / "source"


def test_a_wheel_has_the_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in DATA if name not in names] == []
    roots = {name.partition("/")[0] for name in names}
    packages = set(PACKAGES)
    assert roots == packages | {next(root for root in roots if root.endswith(".dist-info"))}
    for suffix in (".cpp", ".toml", ".npz", ".parquet", ".csv"):
        kept = {str(file.relative_to(ROOT)) for package in packages for file in (ROOT / package).rglob(f"*{suffix}")}
        assert kept <= set(names), suffix


def test_an_sdist_builds_the_same_wheel_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    import tarfile

    (sdist,) = (wheel.parents[1] / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    call(sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('.')", cwd=source)
    again = zipfile.ZipFile(next(source.glob("*.whl")))
    assert {each.filename: each.CRC for each in again.infolist() if ".dist-info" not in each.filename} == {
        each.filename: each.CRC for each in zipfile.ZipFile(wheel).infolist() if ".dist-info" not in each.filename
    }


def test_an_installed_package_replays_from_anywhere_and_goes_away_whole(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "env"
    call(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", site, cwd=tmp_path)
    python = site / "bin" / "python"
    inherited = [path for path in sys.path if path.endswith("site-packages")]
    pth = next((site / "lib").glob("python*")) / "site-packages" / "inherited.pth"
    pth.write_text("\n".join(inherited) + "\n")
    before = sorted(path for path in site.rglob("*") if "__pycache__" not in str(path))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    call(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,9,9\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    where = call(
        python, "-c", "import simulator; print(simulator.__file__)", cwd=tmp_path / "elsewhere", env=env
    ).stdout
    assert str(site) in where
    call(python, "-m", "simulator", "replay", "t.csv", "--out", "run", cwd=tmp_path / "elsewhere", env=env)
    assert (tmp_path / "elsewhere" / "run" / "summary.json").exists()
    call(*pip, "uninstall", "-y", "charioteer", cwd=tmp_path)
    assert sorted(path for path in site.rglob("*") if "__pycache__" not in str(path)) == before
