"""The server process: uvicorn in front of a door, the engine in a thread beside it, and an orderly end.

SIGINT or SIGTERM: no new requests, running ones may end within `drain` seconds, then they are aborted; a second signal
aborts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from workloads.door.app import STOPPED, Door
from workloads.door.contract import DoorError, Engine, Step

SWITCH_S = 0.0005
"""Python hands its lock from thread to thread every 5 ms by default: longer than the engine may be late."""
KEEP_ALIVE_S = 75
BACKLOG = 2048


class Server:
    """Serves until it is told to stop. ready(url): called once clients can connect."""

    def __init__(self, door: Door, *, ready: Callable[[str], None] | None = None) -> None:
        self.door, self._ready = door, ready
        self.stopped_by = ""
        self.failure = ""
        self.url = ""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = False
        door.on_failure = self._failed

    def run(self) -> None:
        """Serve in this thread; signals are heard where it is the main one."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            loop_of = _loop_factory()
            with asyncio.Runner(loop_factory=loop_of) as runner:
                runner.run(self._serve())
        finally:
            sys.setswitchinterval(before)

    def stop(self, why: str = "") -> None:
        """End the session, from any thread."""
        self.stopped_by = self.stopped_by or why
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    def _failed(self, reason: str) -> None:
        self.failure = reason
        self.stop("failure")

    async def _serve(self) -> None:
        import uvicorn

        door, options = self.door, self.door.options
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = _listen(options.host, options.port)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
        config = uvicorn.Config(
            door.routes(),
            http=_patient_protocol(options.header_timeout),
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        server: Any = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # signals are this session's, not the library's
        door.opened()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        watching = asyncio.ensure_future(door.watch())
        engine = threading.Thread(target=_run_engine, args=(door.engine, door.tell), name="engine")
        with self._signals():
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            engine.start()
            if self._ready is not None:
                self._ready(self.url)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.serve_for):
                    stopping = asyncio.ensure_future(self._stop.wait())
                    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        watching.cancel()
        server.should_exit = True
        server.force_exit = self._hurry
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await serving
        await asyncio.to_thread(engine.join)

    async def _drain(self) -> None:
        """No new requests; those that run may end, then they are aborted."""
        door = self.door
        door.closing = True
        assert self._stop is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.failure else door.options.drain):
                while door.answers and not self._hurry:
                    await asyncio.sleep(0.01)
        door.engine.stop(STOPPED)
        # Their ends are still told and written.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while door.answers:
                    await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heard(number: int, frame: object) -> None:
            self._hurry = bool(self.stopped_by)
            self.stop(signal.Signals(number).name)

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run_engine(engine: Engine, tell: Callable[[Step], None]) -> None:
    """The engine's thread; whatever ends it early is told to everybody who waits."""
    try:
        engine.serve(tell)
    except Exception as error:
        import traceback

        words = str(error).splitlines()
        if not isinstance(error, ValueError):
            traceback.print_exc()
        tell(Step(0, failure=words[0] if words and isinstance(error, ValueError) else "the engine has failed"))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections notice, after a minute, that the other side is no longer there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DoorError(f"--host {host} --port {port}: cannot be listened on: {error.strerror or error}") from None
    except OverflowError:
        listener.close()
        raise DoorError(f"--port: found {port}, expected 0 to 65535") from None
    return listener


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _patient_protocol(header_timeout: float) -> Any:
    """uvicorn's HTTP protocol, which otherwise waits for ever for the rest of a request's head."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    def connection_made(self: Any, transport: Any) -> None:
        base.connection_made(self, transport)
        self.deadline = self.loop.call_later(header_timeout, too_late, self)

    def data_received(self: Any, data: bytes) -> None:
        base.data_received(self, data)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        elif not busy and self.deadline is None:
            self.deadline = self.loop.call_later(header_timeout, too_late, self)

    def connection_lost(self: Any, error: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        base.connection_lost(self, error)

    def too_late(self: Any) -> None:
        self.deadline = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    names = {"connection_made": connection_made, "data_received": data_received, "connection_lost": connection_lost}
    return type("PatientProtocol", (base,), {**names, "deadline": None})
