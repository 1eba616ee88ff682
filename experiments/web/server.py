"""Server: the page of one folder on 127.0.0.1, below a random token in its address."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lib.checks import ConfigError
from experiments.lib.files import lock_folder
from experiments.web.config import WebConfig
from experiments.web.prediction import Predictor
from experiments.web.runs import Runs
from fnshard.errors import MissingExtraError

HOST = "127.0.0.1"
LOCK = "web.lock"  # the lock of the folder that a page serves
# A browser loads everything from here, so the page works without a network and tells nobody its address.
POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'self'"
)
HEADERS = {
    "content-security-policy": POLICY, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff",
}  # fmt: skip
ASGI = Callable[
    [Mapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[Any]
]


def serve(config: WebConfig) -> None:
    """Serve the page of a folder until this process is ended. Its runs go on.

    Raises:
        ConfigError: there is no such folder, another page serves it, or the port is taken.
        MissingExtraError: NiceGUI is not installed.
    """
    folder = Path(config.folder).resolve()
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"folder={config.folder}: is no folder that can be written to. Fix: make it.")
    with ExitStack() as stack:
        if not stack.enter_context(lock_folder(folder, LOCK)):
            raise ConfigError(
                f"another page is at work on {folder}. Fix: open its address, or end it; or another folder=."
            )
        listening = stack.enter_context(listen(config.port))
        try:
            import uvicorn
            from fastapi import FastAPI
            from nicegui import ui

            from experiments.web.page import build_page
        except ImportError as error:
            fix = "pip install 'fnshard[web]'"
            raise MissingExtraError(f"{error.name} is not installed. Fix: {fix}.") from error

        # The runs of the folder, and the process that predicts.
        os.chdir(folder)  # paths of a configuration mean what they mean to its command
        port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        runs, predictor = Runs(folder), Predictor(config.patience_s)
        stack.callback(predictor.close)
        threading.Thread(target=predictor.prepare, daemon=True).start()  # the page need not wait for it

        # The page lies below a random token, which the guard demands of each request.
        app = FastAPI(openapi_url=None)
        build_page(runs, predictor, config.refresh_s)
        ui.run_with(
            app, mount_path=f"/{token}", title=f"fnshard: {folder.name}", favicon="🧩", tailwind=False,
            show_welcome_message=False,
        )  # fmt: skip
        print(f"page of {folder}: http://{HOST}:{port}/{token}/  (Ctrl-C ends it; runs go on)", flush=True)
        settings = uvicorn.Config(
            Guard(app, token, port), log_level="warning", lifespan="on", timeout_graceful_shutdown=1
        )
        # Uvicorn shuts down on a signal, and then sends the signal to this process once more.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            uvicorn.Server(settings).run(sockets=[listening])
        finally:
            if at_work := [view.name for view in runs.views() if view.is_at_work]:
                print(f"\nruns go on: {', '.join(at_work)}", file=sys.stderr, flush=True)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine alone.

    Raises:
        ConfigError: the port is taken.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given back is free
    try:
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError(f"port={port}: {error.strerror}. Fix: port=0 takes one that is free.") from None
    return listening


@dataclass(frozen=True)
class Guard:
    """An application in front of the page.

    A request without the token gets 404. So does one that calls this machine by another name, which a foreign
    page may have made to point here (DNS rebinding).
    """

    app: ASGI
    token: str
    port: int

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Refuse a request, or pass it on and add headers that forbid a browser to load from elsewhere."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if not self.admits(scope):
            await refuse(scope, receive, send)
            return

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def admits(self, scope: Mapping[str, Any]) -> bool:
        """Return whether a request has the token, this machine's name, and comes from the page itself."""
        headers = {name: value.decode(errors="replace") for name, value in scope["headers"]}
        names = [f"{name}:{self.port}" for name in (HOST, "localhost")]
        origin = headers.get(b"origin")
        is_own = origin is None or origin in [f"http://{name}" for name in names]
        first = scope["path"].removeprefix("/").partition("/")[0]
        has_token = secrets.compare_digest(first.encode(), self.token.encode())
        return has_token and is_own and headers.get(b"host") in names


async def refuse(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    """Answer that nothing was found."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"not found\n"})
