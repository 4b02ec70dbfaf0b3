"""An HTTP server in a thread, for clients that run without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """A handler that does not log requests to stderr."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[Quiet], port: int = 0) -> Iterator[str]:
    """Runs a server with this handler; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
