"""An HTTP server in a thread, for what calls one and runs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """Says nothing of its requests on stderr."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(answers: type[Quiet], port: int = 0) -> Iterator[str]:
    """The URL where it answers."""
    with ThreadingHTTPServer(("127.0.0.1", port), answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
