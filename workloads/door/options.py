"""How the door is opened, as plain data and as flags: declared once for the commands of both worlds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from policies.edges.declared_settings import check_declared, setting
from workloads.door.contract import DoorError
from workloads.door.words import Words, built_in_words, words_of_folder

GROUP = "Door"
KEY_VARIABLE = "CHARIOTEER_API_KEY"


@dataclass(frozen=True)
class DoorOptions:
    """The HTTP side of a served session. api_key: also from the variable CHARIOTEER_API_KEY, which no list of processes
    shows."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.", group=GROUP)
    port: int = setting(8000, "Port to listen on; 0 takes a free one and says which.", group=GROUP, least=0, most=65535)
    api_key: str | None = setting(
        None, f"Key that clients have to send (Bearer); {KEY_VARIABLE} by default.", group=GROUP
    )
    served_model_name: str | None = setting(None, "Name that clients ask for; the model's own by default.", group=GROUP)
    tokenizer: str | None = setting(
        None, "Folder with tokenizer.json; the model's own, or a built-in one, by default.", group=GROUP
    )
    tokenizer_out: str | None = setting(None, "Write the tokenizer as a folder that load clients take.", group=GROUP)
    max_inflight: int = setting(
        4096, "Most requests at once; who comes beyond gets 429 and Retry-After.", group=GROUP, least=1
    )
    max_body_mib: float = setting(16.0, "Largest body of a request, in MiB.", group=GROUP, above=0, most=1024)
    header_timeout: float = setting(
        20.0, "Seconds in which a client has to send a request's head, and then its body.", group=GROUP, above=0
    )
    request_timeout: float = setting(3600.0, "Seconds after which a request is given up.", group=GROUP, above=0)
    reader_timeout: float = setting(
        30.0, "Seconds in which a client has to take something of what is written to it.", group=GROUP, above=0
    )
    drain: float = setting(
        10.0, "Seconds that running requests have to end once the server is told to stop.", group=GROUP, least=0
    )
    serve_for: float | None = setting(None, "Stop by itself after so many seconds.", group=GROUP, above=0)

    def __post_init__(self) -> None:
        check_declared(self, DoorError)
        if self.api_key is not None and not self.api_key.strip():
            raise DoorError("--api-key: found an empty text, expected a key, or no flag for none")

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get(KEY_VARIABLE) or None

    def words(self, own: Words | None = None) -> Words:
        """The tokenizer of a session. own: the model's, where it has one."""
        words = words_of_folder(Path(self.tokenizer)) if self.tokenizer else own or built_in_words()
        if self.tokenizer_out:
            words.write(Path(self.tokenizer_out))
        return words


def check_installed() -> None:
    """Raises DoorError where the packages of the extra `serve` are missing."""
    for name in ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"):
        if find_spec(name) is None:
            raise DoorError(f"serve: {name} is not installed: pip install 'charioteer[serve]'")
