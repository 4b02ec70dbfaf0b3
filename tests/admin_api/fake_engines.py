"""Workers that answer control calls from a table, over httpx's own transport."""

from __future__ import annotations

import json

import httpx

from omni_proxy.upstream_http import client


class Engines:
    """`replies[(url, path)]`: a reply or an exception, or a list with one of them for each call."""

    def __init__(self):
        self.replies, self.requests = {}, []

    def set_reply(self, url, path, body, status=200):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.replies[url, path] = (status, raw)

    async def answer(self, request):
        self.requests.append(request)
        base = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        reply = self.replies.get((base, request.url.path), (404, b"{}"))
        if isinstance(reply, list):
            reply = reply.pop(0) if len(reply) > 1 else reply[0]
        if isinstance(reply, Exception):
            raise reply
        status, raw = reply

        async def pieces():
            yield raw

        return httpx.Response(status, content=pieces())

    def install(self, monkeypatch):
        def open_client(worker):
            return httpx.AsyncClient(transport=httpx.MockTransport(self.answer))

        monkeypatch.setattr(client, "open_client", open_client)
        return self
