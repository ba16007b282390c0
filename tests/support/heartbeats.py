"""A control plane that takes heartbeats by the REST contract, and answers what a test wants."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from controlplane.nodes.schemas import Heartbeat, HeartbeatReply


class ControlPlane:
    """Keeps what came; answers what the test put into `reply`, or fails while `broken`."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.requests: list[tuple[str, str | None]] = []
        self.reply = HeartbeatReply()
        self.broken = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.requests.append((handler.path, handler.headers.get("authorization")))
        status = 503 if self.broken else 200
        if not self.broken:
            self.beats.append(Heartbeat.model_validate_json(body))
        answer = self.reply.model_dump_json().encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def has(self, num_requests: int) -> bool:
        return len(self.requests) >= num_requests

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
