"""A client of the HTTP door for tests: plain sockets, so that a test sees the very bytes and can leave in the middle."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any
from urllib.parse import urlsplit


class Client:
    def __init__(self, url: str) -> None:
        self.url = url
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=20)

    def send(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """One request; body: JSON-able, or bytes as they are."""
        connection = self.connect()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST" if data is not None else "GET", path, data, names)
        response = connection.getresponse()
        response.connection = connection
        return response

    def json(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        response = self.send(path, body, **headers)
        return response.status, json.loads(response.read() or b"null")

    def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """The data of every event of a stream, the last one's as the text it is."""
        response = self.send(path, {**body, "stream": True}, **headers)
        assert response.status == 200, response.read()
        return list(events_of(response.read()))

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name, summed over labels."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.send("/metrics").read().decode()):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


def events_of(stream: bytes) -> Iterator[Any]:
    for block in stream.decode().strip().split("\n\n"):
        assert block.startswith("data: "), block
        yield block[6:] if block == "data: [DONE]" else json.loads(block[6:])


@contextmanager
def serving(session: Any) -> Iterator[Client]:
    """A session in a thread of its own, stopped at the end; `session.result` is then what `run` has returned."""
    there: Queue[Any] = Queue()
    session.server._ready = there.put

    def run() -> None:
        try:
            session.result = session.run()
        except BaseException as error:
            session.error = error
            there.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    url = there.get(timeout=60)
    if isinstance(url, BaseException):
        raise url
    try:
        yield Client(url)
    finally:
        session.server.stop("test")
        thread.join(30)
        assert not thread.is_alive()
    if getattr(session, "error", None) is not None:
        raise session.error
