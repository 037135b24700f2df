"""What results were made from, by content: a file that was edited is another input, whatever it is called."""

from __future__ import annotations

import hashlib
from pathlib import Path

from policies.edges.input_digests import changed_inputs, digest_of, digests_of, named_files


def test_every_file_that_settings_name_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("t.csv", "no_suffix", "my.py", "lengths.txt", "gpu.toml"):
        Path(name).write_text(name)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    settings = {
        "trace": "no_suffix",
        "policy": "my.py:Mine",
        "gpu": "gpu.toml",
        "model": f"{tmp_path}/model",
        "pools": [{"prompt": "empirical:lengths.txt"}],
        "cost_model": "auto",
        "limit": 3,
    }
    found = ["no_suffix", "my.py", "gpu.toml", f"{tmp_path}/model", "lengths.txt"]
    assert named_files(settings) == found
    assert digests_of(settings)["my.py"] == hashlib.sha256(b"my.py").hexdigest()


def test_what_belongs_to_a_file_is_part_of_its_content(tmp_path: Path) -> None:
    """A fitted model's arrays lie beside its .json, a pipeline's stages too; a folder is all that lies in it."""
    model = tmp_path / "fit.json"
    (tmp_path / "folder").mkdir()
    for name in ("fit.json", "fit.npz", "fit.stage1.json", "fit.stage1.npz", "other.npz", "folder/config.json"):
        (tmp_path / name).write_text("as measured")
    for name in ("fit.json", "fit.npz", "fit.stage1.json", "fit.stage1.npz"):
        before = digest_of(str(model))
        (tmp_path / name).write_text("edited here")
        assert digest_of(str(model)) != before, name
    before = digest_of(str(model))
    (tmp_path / "other.npz").write_text("edited here")
    assert digest_of(str(model)) == before
    before = digest_of(str(tmp_path / "folder"))
    (tmp_path / "folder" / "tokenizer.json").write_text("new")
    assert digest_of(str(tmp_path / "folder")) != before


def test_a_difference_is_told_by_name_and_digests() -> None:
    then = {"t.csv": "a" * 64, "gone.csv": "b" * 64}
    assert changed_inputs(then, {"t.csv": "a" * 64, "new.csv": "c" * 64}) == []
    assert changed_inputs(then, {"t.csv": "d" * 64}) == [f"t.csv (sha256 {'a' * 12} then, {'d' * 12} now)"]
