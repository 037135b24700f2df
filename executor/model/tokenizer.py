"""Text to token ids and back, from a folder's tokenizer.json or a GGUF file's own tables (byte-level BPE)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from executor.errors import ExecutorError
from executor.model.gguf_file import GgufFile
from executor.model.loading import ModelSource
from policies.edges.input_file import checked_file, read_json
from policies.edges.settings import shown
from workloads.door.words import Words

MAX_TOKENIZER_BYTES = 256 << 20


class Tokenizer:
    """stop_ids: ids that end an answer (end of text, and of the turn for chat models). add_bos: id to begin with."""

    def __init__(self, inner: Any, stop_ids: Sequence[int], add_bos: int | None, chat_form: str = "") -> None:
        self._inner, self.stop_ids, self._bos, self._chat_form = inner, tuple(stop_ids), add_bos, chat_form

    def encode(self, text: str) -> list[int]:
        with _told("this text cannot be encoded"):
            ids = list(self._inner.encode(text, add_special_tokens=False).ids)
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        with _told("these ids cannot be decoded"):
            return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def chat(self, text: str) -> str:
        """The text as a user's turn, for models whose chat form is ChatML; unchanged for others."""
        if "<|im_start|>" not in self._chat_form:
            return text
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def words(self) -> Words:
        """The same tokenizer as the HTTP door takes it."""
        special = {}
        for name, token in (("bos_token", self._bos), ("eos_token", next(iter(self.stop_ids), None))):
            if token is not None and (text := self._inner.id_to_token(token)) is not None:
                special[name] = text
        return Words(self._inner, stop_ids=self.stop_ids, bos=self._bos, chat_template=self._chat_form, special=special)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """The tokenizer's library raises bare Exception, and a panic of its Rust code is not even one."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, ExecutorError):
        raise
    except BaseException as error:
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise ExecutorError(f"tokenizer: {what}: {words}") from None


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model; ExecutorError where it has none (a bare spec)."""
    if source.kind == "gguf":
        assert source.path is not None
        return _from_gguf(GgufFile(source.path))
    if source.path is None:
        raise ExecutorError(f"model {source.spec.name} has random weights and no tokenizer: text needs a model folder")
    return _from_folder(source.path)


def _from_folder(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Inner

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ExecutorError(f"{folder}: no tokenizer.json; text prompts need one")
    checked_file(path, ExecutorError, MAX_TOKENIZER_BYTES)
    with _told(f"{path} cannot be read"):
        inner = Inner.from_file(str(path))
    settings = _json(folder / "tokenizer_config.json")
    stop = _json(folder / "generation_config.json").get("eos_token_id")
    stop = _json(folder / "config.json").get("eos_token_id") if stop is None else stop
    stop_ids = [] if stop is None else list(stop) if isinstance(stop, list) else [stop]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in stop_ids):
        raise ExecutorError(f"{folder}: eos_token_id: found {str(stop)[:60]}, expected token ids")
    bos = settings.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    if bos is not None and not isinstance(bos, str):
        raise ExecutorError(f"{folder}: bos_token: found {str(bos)[:60]}, expected a text")
    bos_id = inner.token_to_id(bos) if bos and settings.get("add_bos_token") else None
    return Tokenizer(inner, stop_ids, bos_id, str(settings.get("chat_template", "")))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_json(path, ExecutorError, MAX_TOKENIZER_BYTES)
    return found if isinstance(found, dict) else {}


_CONTROL = 3  # GGUF's token type of special tokens
_PRETOKENIZERS = ("smollm", "gpt-2", "default")


def _from_gguf(file: GgufFile) -> Tokenizer:
    from tokenizers import AddedToken, decoders, pre_tokenizers
    from tokenizers import Tokenizer as Inner
    from tokenizers.models import BPE

    kind, cut = file.fact("tokenizer.ggml.model", str), file.fact("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or cut not in _PRETOKENIZERS:
        found = f"tokenizer {shown(kind)} cut by {shown(cut)}"
        raise ExecutorError(f"{file.path}: {found} is not read; expected byte-level BPE")
    tokens, lines = (file.fact(f"tokenizer.ggml.{name}", tuple) for name in ("tokens", "merges"))
    kinds = file.fact("tokenizer.ggml.token_type", tuple, [])
    for name, texts in (("tokens", tokens), ("merges", lines)):
        if not all(isinstance(text, str) for text in texts):
            raise ExecutorError(f"{file.path}: tokenizer.ggml.{name}: expected a list of texts")
    merges = [tuple(line.split(" ", 1)) for line in lines]
    with _told(f"the tables of {file.path} make none"):
        inner = Inner(BPE({token: i for i, token in enumerate(tokens)}, merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t, k in zip(tokens, kinds) if k == _CONTROL])
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stop_ids = [file.whole(key) for key in ends if key in file.facts]
    bos = file.whole("tokenizer.ggml.bos_token_id") if file.fact("tokenizer.ggml.add_bos_token", bool, False) else None
    for number in (*stop_ids, *(() if bos is None else (bos,))):
        if not 0 <= number < len(tokens):
            raise ExecutorError(f"{file.path}: special token: found {number}, expected one of its {len(tokens)}")
    return Tokenizer(inner, stop_ids, bos, str(file.facts.get("tokenizer.chat_template", "")))
