"""One line a request, with an id that the client sees too; as JSON where a collector reads it."""

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_ID = re.compile(r"[\w.:-]{1,128}")


class JsonFormatter(logging.Formatter):
    """Log records as JSON lines: time, level, logger, message, request_id, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: dict[str, Any] = getattr(record, "fields", {})
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | fields, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Write the log of this process as JSON lines on stderr, a line a request included."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    logger.setLevel(logging.INFO)


class RequestLog:
    """Middleware that gives each request an id (the client's x-request-id, if sound) and logs its end.

    tells_id: whether the answer has the id; False if a proxy adds it.
    """

    def __init__(self, app: ASGIApp, *, tells_id: bool = True) -> None:
        self._app, self._tells_id = app, tells_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        token, started = request_id.set(name), time.perf_counter()
        status = 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if self._tells_id:
                    headers["x-request-id"] = name
                else:
                    del headers["x-request-id"]
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            seconds = time.perf_counter() - started
            fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
            logger.info("request", extra={"fields": fields})
            request_id.reset(token)
