"""The door itself: Starlette routes in front, the engine's steps behind, and everybody's answer in between.

A request is checked, counted and handed to the engine; its handler then only waits for the client to leave. Everything
else happens once a step, in `_deliver`: the tokens of all clients are decoded, recorded and written there in one go.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from policies.edges.compiling import how_built
from workloads.door.answers import WATCHED_S, Answer, Outlet
from workloads.door.asks import RefusedError, Wanted, checked_messages, parse_body, prompt_ids, wanted_of
from workloads.door.contract import OVERLOADED_AFTER_S, Ask, DoorError, Ended, Engine, Step
from workloads.door.gauges import Gauges
from workloads.door.options import DoorOptions
from workloads.door.replies import Reply
from workloads.door.session import Visitors, Wire
from workloads.door.words import Words

LEFT = "client disconnected"
SLOW = "client does not read what is written to it"
LATE = "request timed out"
STOPPED = "the server is shutting down"
_RETRY = re.compile(r"retry after (\d+) s")
_OURS = re.compile(r"[\w.:\-]{1,128}")


class Door:
    """One engine's HTTP side. on_failure(reason): the engine has come to an end by itself."""

    def __init__(
        self,
        engine: Engine,
        words: Words,
        options: DoorOptions,
        *,
        wire: Wire | None = None,
        visitors: Visitors | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.engine, self.words, self.options = engine, words, options
        self.model = options.served_model_name or engine.model
        self.gauges = Gauges(self.model, engine.loads, engine.max_model_len, engine.clock.lateness)
        self.wire, self.visitors = wire or Wire(None), visitors
        self.answers: dict[int, Answer] = {}
        self.closing = False
        self.on_failure = on_failure
        self.counts = {"requests": 0, "refused": 0, "disconnects": 0, "slow_readers": 0, "timeouts": 0}
        self._stop_ids = frozenset(words.stop_ids)
        self._steps: deque[Step] = deque()
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._number = 0
        self._gaps = self._gaps_ns = 0
        self._ended_at: deque[float] = deque(maxlen=64)
        self._started = time.time()

    @property
    def mean_gap_s(self) -> float:
        """Between two tokens of an answer, as the engine had them; 0 before there were any."""
        return self._gaps_ns / self._gaps / 1e9 if self._gaps else 0.0

    # From the engine's thread

    def tell(self, step: Step) -> None:
        """A step of the engine, in its thread: it is delivered by the loop's."""
        self._steps.append(step)
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop has been closed: nobody is left to be told

    # In the loop

    def opened(self) -> None:
        """The loop runs: the engine may begin."""
        self._loop = asyncio.get_running_loop()

    def _deliver(self) -> None:
        self._scheduled = False
        steps = self._steps
        while steps:
            self._deliver_one(steps.popleft())

    def _deliver_one(self, step: Step) -> None:
        answers, gauges, time_ns = self.answers, self.gauges, step.time_ns
        for number, arrival_ns, replica in step.accepted:
            if (answer := answers.get(number)) is not None:
                answer.arrival_ns, answer.replica = arrival_ns, replica
                answer.accepted.set()
        for replica, tokens in step.batches:
            gauges.batch(replica, tokens)
        ended = {end.number: end for end in step.ended} if step.ended else {}
        now_ns, wire = self.engine.clock.now_ns, self.wire
        written: dict[int, int] = {}
        for number, new in step.tokens:
            answer = answers.get(number)
            if answer is None or answer.finish:
                continue
            end = ended.get(number)
            replica, count = answer.replica, len(new)
            if answer.last_ns < 0:
                gauges.first(replica, time_ns - answer.arrival_ns)
            else:
                gauges.gap(replica, time_ns - answer.last_ns)
                self._gaps_ns += time_ns - answer.last_ns
                self._gaps += 1
            answer.last_ns = time_ns
            finished = end is not None and end.status == "finished"
            by_stop = end is not None and end.by_stop
            for at, token in enumerate(new, 1):
                if answer.take(token, last=finished and at == count, by_stop=by_stop and at == count):
                    self.engine.cancel(number, "", "finished")
                    break
            answer.flush()
            at_ns = now_ns()
            gauges.wire.late(at_ns - time_ns, count)
            for _ in new:
                wire.written(number, time_ns, at_ns)
            written[replica] = written.get(replica, 0) + count
        for replica, count in written.items():
            gauges.generated(replica, count)
        for end in step.ended:
            self._end(end)
        if step.failure:
            self._fail(step.failure)

    def _end(self, end: Ended) -> None:
        if self.visitors is not None:
            self.visitors.went(end)
        answer = self.answers.get(end.number)
        if answer is None:
            return
        answer.ended = end
        answer.reply.cached = end.cached_tokens
        wanted = answer.reply.wanted
        if end.status == "finished" and not answer.finish:
            answer.close_text("stop" if end.by_stop else "length")
        self.gauges.ended(end, wanted, answer.finish)
        if end.status != "finished":
            answer.error = _what_went_wrong(end)
            retry = _RETRY.search(end.reason)
            answer.retry_s = int(retry[1]) if retry else OVERLOADED_AFTER_S if answer.error[0] in (429, 503) else None
        self._ended_at.append(time.monotonic())
        if answer.streams:
            answer.end_stream()
        answer.accepted.set()
        answer.done.set()
        del self.answers[end.number]

    def _fail(self, reason: str) -> None:
        """The engine is gone: everybody who still waits hears of it."""
        now = self.engine.clock.now_ns()
        for number in list(self.answers):
            self._end(Ended(number, "failed", reason, False, now, -1, -1, now, 0, 0, 0, 0))
        self.closing = True
        if self.on_failure is not None:
            self.on_failure(reason)

    # Requests

    async def completions(self, request: Request) -> _Reply:
        return await self._complete(request, chat=False)

    async def chat(self, request: Request) -> _Reply:
        return await self._complete(request, chat=True)

    async def _complete(self, request: Request, *, chat: bool) -> _Reply:
        received_ns = self.engine.clock.now_ns()
        body = await self._body(request)
        self._admit()
        wanted = wanted_of(
            body, self.words, chat=chat, max_model_len=self.engine.max_model_len, vocab=self.engine.vocab
        )
        if wanted.model not in ("", self.model, self.engine.model):
            raise _no_such_model(wanted.model, self.model)
        self._admit()
        answer = self._ask(wanted, request, received_ns)
        return _Reply(self, answer, request)

    def _ask(self, wanted: Wanted, request: Request, received_ns: int) -> Answer:
        number = self._number
        self._number += 1
        self.counts["requests"] += 1
        given = request.headers.get("x-request-id", "")
        name = given if _OURS.fullmatch(given) else uuid.uuid4().hex
        session = request.headers.get("x-session-id") or request.headers.get("x-correlation-id")
        ask = Ask(
            number,
            wanted.prompt_ids,
            wanted.max_tokens,
            wanted.ignore_eos,
            wanted.temperature,
            wanted.top_p,
            wanted.top_k,
            number if wanted.seed is None else wanted.seed,
            wanted.priority,
            session[:200] if session else None,
            received_ns,
            wanted.user[:200] or None,
        )
        prefix = "chatcmpl-" if wanted.chat else "cmpl-"
        answer = Answer(ask, Reply(wanted, prefix + name, self.model), self.words.stream(), self._stop_ids)
        self.answers[number] = answer
        if self.visitors is not None:
            self.visitors.came(ask)
        self.engine.submit(ask)
        return answer

    def _admit(self) -> None:
        if self.closing:
            raise RefusedError(STOPPED, status=503, kind="server_error", code="shutting_down", retry_s=1)
        if len(self.answers) >= self.options.max_inflight:
            self.counts["refused"] += 1
            self.gauges.refused("max_inflight")
            raise RefusedError(
                f"{len(self.answers)} requests are being served, at most {self.options.max_inflight} may be; try again",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_s=self._free_after_s(),
            )

    def _free_after_s(self) -> int:
        """Seconds until somebody ends, as the last ones did."""
        ends = self._ended_at
        if len(ends) < 2:
            return OVERLOADED_AFTER_S
        return max(OVERLOADED_AFTER_S, round((ends[-1] - ends[0]) / (len(ends) - 1)))

    async def _body(self, request: Request) -> dict[str, Any]:
        most = int(self.options.max_body_mib * (1 << 20))
        too_large = RefusedError(
            f"the body is larger than {self.options.max_body_mib:g} MiB", status=413, code="body_too_large"
        )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.options.header_timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            self.counts["timeouts"] += 1
            raise RefusedError(
                f"the body did not come within {self.options.header_timeout:g} s", status=408, code="timeout"
            ) from None
        return parse_body(b"".join(parts))

    async def watch(self) -> None:
        """Look now and then for requests that last too long and for readers that have stopped reading."""
        while True:
            await asyncio.sleep(WATCHED_S)
            self._look(asyncio.get_running_loop().time(), self.engine.clock.now_ns())

    def _look(self, now: float, now_ns: int) -> None:
        for answer in list(self.answers.values()):
            outlet = answer.outlet
            if outlet is not None and outlet.stuck_since is not None:
                if now - outlet.stuck_since > self.options.reader_timeout:
                    self.counts["slow_readers"] += 1
                    self.engine.cancel(answer.ask.number, SLOW)
            if now_ns - answer.ask.received_ns > self.options.request_timeout * 1e9:
                self.counts["timeouts"] += 1
                self.engine.cancel(answer.ask.number, f"{LATE} after {self.options.request_timeout:g} s")

    # Other routes

    async def models(self, request: Request) -> Response:
        about = {
            "id": self.model,
            "object": "model",
            "created": int(self._started),
            "owned_by": "charioteer",
            "root": self.engine.model,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }
        name = request.path_params.get("name")
        if name is not None:
            if name != self.model:
                raise _no_such_model(name, self.model)
            return JSONResponse(about)
        return JSONResponse({"object": "list", "data": [about]})

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.closing else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "charioteer", "core": how_built(), **self.engine.facts()})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.gauges.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        longest = self.engine.max_model_len
        if "messages" in body:
            answer = body.get("add_generation_prompt", True) is not False
            try:
                ids = self.words.encode(self.words.chat(checked_messages(body["messages"]), answer=answer))
            except DoorError as error:
                raise RefusedError(str(error), param="messages") from None
        else:
            ids = list(prompt_ids(body.get("prompt"), self.words, longest))
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        ids = (await self._body(request)).get("tokens")
        most = (1 << 32) - 1
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token <= most for token in ids):
            raise RefusedError("tokens: expected a list of token ids", param="tokens")
        return JSONResponse({"prompt": self.words.decode(ids)})

    def routes(self) -> Any:
        """The ASGI application."""
        routes: list[Any] = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]
        handlers: dict[Any, Any] = {
            RefusedError: _refusal,
            HTTPException: _no_route,
            ClientDisconnect: _gone,
            Exception: _broken,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        return _Guarded(app, self.options.key) if self.options.key else app


class _Reply:
    """Waits for the engine, then answers at once or as a stream; a client that leaves is withdrawn from the engine."""

    def __init__(self, door: Door, answer: Answer, request: Request) -> None:
        self._door, self._answer = door, answer
        self._given = request.headers.get("x-request-id", "")[:128]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer, door = self._answer, self._door
        number = answer.ask.number
        leaving: asyncio.Future[Any] = asyncio.ensure_future(_left(receive))
        try:
            await self._answered_by(answer.accepted if answer.streams else answer.done, leaving)
            if answer.error is not None:
                response = _error(*answer.error, answer.retry_s)
                await response(scope, receive, send)
            elif answer.streams:
                await self._stream(answer, send, leaving)
            elif answer.done.is_set():
                whole = answer.reply.whole("".join(answer.text), answer.finish, answer.tokens)
                await JSONResponse(whole, headers=self._own_headers())(scope, receive, send)
            if leaving.done() and not answer.done.is_set():
                door.counts["disconnects"] += 1
        finally:
            leaving.cancel()
            if not answer.done.is_set():
                door.engine.cancel(number, LEFT)

    async def _answered_by(self, event: asyncio.Event, leaving: asyncio.Future[Any]) -> None:
        """Returns once the event is set or the client has left."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([waiting, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def _stream(self, answer: Answer, send: Any, leaving: asyncio.Future[Any]) -> None:
        if leaving.done():
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in self._own_headers().items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        outlet = answer.outlet = Outlet(send, asyncio.get_running_loop())
        if answer.done.is_set():
            answer.end_stream()  # it ended before anybody could write to it
        else:
            answer.flush()
        await self._answered_by(answer.done, leaving)
        if answer.done.is_set():
            with_client: asyncio.Future[Any] = asyncio.ensure_future(outlet.flushed())
            await asyncio.wait([with_client, leaving], timeout=self._door.options.reader_timeout)
            with_client.cancel()
        outlet.drop()

    def _own_headers(self) -> dict[str, str]:
        return {"x-request-id": self._given or self._answer.reply.name}


class _Guarded:
    """The application behind a key: everything but /health asks for it."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", "/ping"):
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                error = RefusedError(
                    "Incorrect API key provided: send the server's as Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                )
                await _error(error.status, error.as_dict(), None)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _left(receive: Any) -> None:
    """Returns once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _what_went_wrong(end: Ended) -> tuple[int, dict[str, Any]]:
    """HTTP status and error of a request that has not finished."""
    if end.status == "rejected" and _RETRY.search(end.reason):
        error = RefusedError(end.reason, status=429, kind="rate_limit_error", code="rate_limit_exceeded")
    elif end.status == "rejected":
        error = RefusedError(end.reason, code="request_rejected")
    elif end.status == "aborted" and end.reason.startswith(LATE):
        error = RefusedError(end.reason, status=504, kind="server_error", code="timeout")
    elif end.status == "aborted":
        error = RefusedError(end.reason, status=503, kind="server_error", code="aborted")
    else:
        error = RefusedError(end.reason or "the request failed", status=500, kind="server_error", code="failed")
    return error.status, error.as_dict()


def _error(status: int, content: Mapping[str, Any], retry_s: int | None) -> JSONResponse:
    headers = {"Retry-After": str(retry_s)} if retry_s is not None else {}
    if status in (408, 413):
        headers["Connection"] = "close"
    return JSONResponse(content, status, headers)


def _no_such_model(name: str, served: str) -> RefusedError:
    shown = json.dumps(name[:80])
    return RefusedError(
        f"The model {shown} does not exist; {json.dumps(served)} is served here",
        status=404,
        param="model",
        code="model_not_found",
    )


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(error.status, error.as_dict(), error.retry_s)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = RefusedError(str(error.detail), status=error.status_code, code=None)
    response = _error(what.status, what.as_dict(), None)
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _broken(request: Request, error: Exception) -> Response:
    """A bug of ours: whoever runs the server sees it, the client reads a sentence."""
    traceback.print_exception(error)
    what = RefusedError("the server failed at this request", status=500, kind="server_error", code="internal_error")
    return _error(what.status, what.as_dict(), None)
