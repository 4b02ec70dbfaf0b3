import argparse
import json

import pytest

from omni_proxy.cli.client.admin_client import add_target_arguments, admin_target_of
from tests.http_server import Quiet, served


@pytest.fixture
def place(monkeypatch):
    """Where a command with these words would ask."""
    monkeypatch.delenv("SGLANG_OMNI_ADMIN_KEY", raising=False)

    def of(*words):
        parser = argparse.ArgumentParser()
        add_target_arguments(parser)
        return admin_target_of(parser.parse_args([str(word) for word in words]))

    return of


@pytest.fixture
def proxy(monkeypatch):
    """A server that answers as it is told and notes what it was asked."""
    monkeypatch.delenv("SGLANG_OMNI_ADMIN_KEY", raising=False)

    class Answers(Quiet):
        says, asked, preferences = {}, [], []

        def do_GET(self):
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            self.asked.append((self.path, body, self.headers.get("authorization")))
            self.preferences.append(self.headers.get("prefer"))
            answer = self.says.get(self.path.partition("?")[0], (404, {}))
            status, reported = answer() if callable(answer) else answer
            raw = reported if isinstance(reported, bytes) else json.dumps(reported).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_PUT = do_DELETE = do_GET

    with served(Answers) as Answers.url:
        yield Answers
