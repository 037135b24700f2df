"""Texts and token ids at the door: the tokenizer of a model's folder, or a built-in one that needs no model.

The built-in one is a byte-level BPE of 4,096 entries, trained on this project's documentation (`words.json`). Words of
its own vocabulary are what a simulated engine answers with: each is one token, and text made of them is cut into the
same tokens again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from policies.edges.errors import InputError
from policies.edges.input_file import checked_file, read_json, read_text
from policies.edges.output_file import write_bytes
from workloads.door.contract import DoorError

BUILT_IN = Path(__file__).with_name("words.json")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat form of the built-in tokenizer, and of a model that brings none: ChatML (OpenAI, 2023)."""
MOST_BYTES = 256 << 20


class Words:
    """One tokenizer. inner: of the package `tokenizers`. stop_ids: ids that end an answer. bos: id to begin with.

    chat_template: Jinja, as Hugging Face's tokenizers bring it. special: texts of special tokens by name, which such a
    template may ask for (bos_token, eos_token). speaks: whether ids that are not the tokenizer's own, such as those of
    a model with random weights, are shown as words of `answers`.
    """

    def __init__(
        self,
        inner: Any,
        *,
        stop_ids: Sequence[int] = (),
        bos: int | None = None,
        chat_template: str = "",
        special: Mapping[str, str] | None = None,
        speaks: bool = False,
    ) -> None:
        self.speaks = speaks
        self.inner, self.stop_ids, self.bos = inner, tuple(stop_ids), bos
        self.chat_template, self.special = chat_template or CHATML, dict(special or {})

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Token ids; with the beginning token, where the model has one, unless the text brings it."""
        ids = list(_said(lambda: self.inner.encode(text, add_special_tokens=False).ids, "this text"))
        return ids if not begin or self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        if self.speaks:
            ids = [self.answers[token % len(self.answers)] for token in ids]
        return str(_said(lambda: self.inner.decode(list(ids), skip_special_tokens=True), "these ids"))

    def stream(self) -> Callable[[int], str]:
        """Id after id to text: each call gives what has become certain, "" inside a character of several tokens."""
        from tokenizers.decoders import DecodeStream

        decoding, inner = DecodeStream(skip_special_tokens=True), self.inner
        if self.speaks:
            spoken = self.answers
            return lambda token: decoding.step(inner, spoken[token % len(spoken)]) or ""
        return lambda token: decoding.step(inner, token) or ""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **more: Any) -> str:
        """The messages as the model was taught to read them. Raises DoorError where its template refuses them."""
        from jinja2.exceptions import TemplateError

        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=answer, tools=None, documents=None, **self.special, **more
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DoorError(f"the model's chat template refuses these messages: {error}") from None
        return str(text)

    @cached_property
    def _template(self) -> Any:
        """Rendered as transformers does it: sandboxed, with the same two whitespace rules and helpers."""
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)

    @cached_property
    def answers(self) -> tuple[int, ...]:
        """Ids of whole lower-case words after a space: any sequence of them is cut into the same ids again."""
        found = []
        for token in range(self.inner.get_vocab_size()):
            text = self.inner.decode([token], skip_special_tokens=True)
            if len(text) > 2 and text[0] == " " and text[1:].isascii() and text[1:].isalpha() and text[1:].islower():
                if self.inner.encode(text, add_special_tokens=False).ids == [token]:
                    found.append(token)
        if not found:
            raise DoorError("tokenizer: found no token that is a word, expected some to answer with")
        return tuple(found)

    def write(self, folder: Path) -> None:
        """The tokenizer as a folder that load clients (transformers' AutoTokenizer) take."""
        ends = [self.inner.id_to_token(token) for token in self.stop_ids]
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 20,
            **self.special,
        }
        if ends:
            config.setdefault("eos_token", ends[0])
            config.setdefault("pad_token", ends[0])
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "tokenizer.json", self.inner.to_str().encode(), DoorError)
        write_bytes(folder / "tokenizer_config.json", json.dumps(config, indent=2).encode(), DoorError)


def built_in_words() -> Words:
    """The tokenizer that needs no model."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(BUILT_IN))
    stop_ids: list[Any] = [inner.token_to_id(text) for text in ("<|end|>", "<|im_end|>")]
    return Words(inner, stop_ids=stop_ids, special={"eos_token": "<|end|>"})


def words_of_folder(folder: Path) -> Words:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and what its neighbours say of ends and chats."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DoorError(f"{folder}: found no tokenizer.json, expected the folder of a tokenizer")
    checked_file(path, DoorError, MOST_BYTES)
    inner = _said(lambda: Tokenizer.from_file(str(path)), str(path))
    settings = _json(folder / "tokenizer_config.json")
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            special[name] = value
    stop = _json(folder / "generation_config.json").get("eos_token_id")
    stop = _json(folder / "config.json").get("eos_token_id") if stop is None else stop
    if stop is None and "eos_token" in special:
        stop = inner.token_to_id(special["eos_token"])
    stop_ids = [] if stop is None else list(stop) if isinstance(stop, list) else [stop]
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in stop_ids):
        raise DoorError(f"{folder}: eos_token_id: found {str(stop)[:60]}, expected token ids")
    begins = settings.get("add_bos_token") and "bos_token" in special
    return Words(
        inner,
        stop_ids=stop_ids,
        bos=inner.token_to_id(special["bos_token"]) if begins else None,
        chat_template=chat_template_of(folder, settings),
        special=special,
    )


def chat_template_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """chat_template.jinja beside the tokenizer, or the one in its settings (of several, the default one)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file, DoorError, MOST_BYTES)
    template = settings.get("chat_template", "")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default") or ""
    return template if isinstance(template, str) else ""


def _json(path: Path) -> dict[str, Any]:
    found = read_json(path, DoorError, MOST_BYTES) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _said(call: Callable[[], Any], what: str) -> Any:
    """The tokenizers' library raises bare Exception, and a panic of its Rust code is not even one."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, InputError):
        raise
    except BaseException as error:
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise DoorError(f"tokenizer: {what} cannot be taken: {words}") from None
