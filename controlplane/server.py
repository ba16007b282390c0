"""The web server around the application: uvicorn on uvloop and httptools, ended by a signal."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from controlplane.app import create_app
from controlplane.plane import Plane
from controlplane.settings import Settings

STOP_SECONDS = 3


def serve(settings: Settings, listener: socket.socket) -> bool:
    """Serve until SIGTERM or SIGINT; False if it could not start."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config, app.state.plane)
    server.run(sockets=[listener])
    return server.started


class _Server(uvicorn.Server):
    """Ends event streams and long polls as soon as it is told to stop: they never end alone.

    A signal that was obeyed is not raised again at the end, as uvicorn would: the exit code is 0.
    """

    def __init__(self, config: uvicorn.Config, plane: Plane) -> None:
        super().__init__(config)
        self._plane = plane

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._plane.close_streams()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
