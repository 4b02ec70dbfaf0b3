import argparse
import json

import pytest

from omni_proxy.cli.client.admin_client import add_target_arguments, admin_target_of
from tests.http_server import Quiet, served


@pytest.fixture
def target_of(monkeypatch):
    """A function that returns the target of a command with these arguments."""
    monkeypatch.delenv("SGLANG_OMNI_ADMIN_KEY", raising=False)

    def parse(*args):
        parser = argparse.ArgumentParser()
        add_target_arguments(parser)
        return admin_target_of(parser.parse_args([str(arg) for arg in args]))

    return parse


@pytest.fixture
def proxy(monkeypatch):
    """A server that answers with `replies[path]`, a tuple or a function, and records requests."""
    monkeypatch.delenv("SGLANG_OMNI_ADMIN_KEY", raising=False)

    class Proxy(Quiet):
        replies, requests, preferences = {}, [], []

        def do_GET(self):
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            self.requests.append((self.path, body, self.headers.get("authorization")))
            self.preferences.append(self.headers.get("prefer"))
            reply = self.replies.get(self.path.partition("?")[0], (404, {}))
            status, content = reply() if callable(reply) else reply
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_PUT = do_DELETE = do_GET

    with served(Proxy) as Proxy.url:
        yield Proxy
