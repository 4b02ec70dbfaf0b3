"""A trainer's client of one inference endpoint; calls never raise.

Trainers look at `success` (pause and continue: `status`), not at the HTTP status; an endpoint that
can't be reached or an unreadable answer counts as a refusal with a reason (note:two-phase 1.1).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from omni_proxy.cli.client.admin_client import KEY_VARIABLE
from omni_proxy.cli.client.tls_options import (
    NO_CLIENT_CERT,
    ClientCert,
    create_tls_context,
    explain_tls_error,
)
from omni_proxy.process_group.broadcast.tensor_hashing import roll_up

SHORT_SECS = 60.0
ABSENT = (404, 502)  # no such route: of a vLLM engine, and of a proxy if no engine has the route
OwnDigest = Callable[[int], str]
UNAUTHORIZED = 401  # no key was sent; a wrong key gets 403, with a clear message


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call; `status` is 0 if there was none."""

    path: str
    status: int
    body: dict[str, Any]
    secs: float

    @property
    def ok(self) -> bool:
        return self.body.get("success") is True or self.body.get("status") == "ok"

    @property
    def why(self) -> str:
        """The first cause of a failure, as far as the answer has it."""
        cause = _cause(self.body)
        for each in _rows(self.body.get("results")):
            worker, reply = each.get("worker"), each.get("body") or each.get("error")
            if worker and each.get("success") is False:
                reported = _cause(reply) if isinstance(reply, dict) else reply
                return cause if str(worker) in cause else f"{cause}: {worker}: {reported}"
        return cause


class Pending:
    """A call in progress, in its own thread."""

    def __init__(self, endpoint: Endpoint, path: str, body: dict[str, Any]) -> None:
        self._came: list[Answer] = []
        self.ended = threading.Event()

        def run() -> None:
            self._came.append(endpoint.call(path, body))
            self.ended.set()

        threading.Thread(target=run, name=f"call {path}", daemon=True).start()

    def answer(self) -> Answer:
        """Wait for the answer."""
        self.ended.wait()
        return self._came[0]

    def wait(self) -> str:
        """Wait for the answer; return why the call failed, "" if it succeeded."""
        answer = self.answer()
        return "" if answer.ok else f"{answer.path} answered {answer.status}: {answer.why}"

    def refused(self) -> str:
        """The same without waiting: also "" while the call is in progress."""
        return self.wait() if self.ended.is_set() else ""


class Endpoint:
    """Calls an endpoint; `timeout_secs` bounds each call."""

    def __init__(
        self,
        url: str,
        timeout_secs: float,
        *,
        certificate: ClientCert = NO_CLIENT_CERT,
        key: str = "",
    ) -> None:
        """`certificate` is for https, `key` for a proxy. Raises PemError."""
        self.url = url.rstrip("/")
        self.timeout_secs = timeout_secs
        self.calls: list[Answer] = []
        self._certificate = certificate
        self._client = httpx.Client(
            base_url=self.url,
            timeout=timeout_secs,
            headers=[(b"authorization", f"Bearer {key}".encode())] if key else [],
            verify=create_tls_context(certificate) if self.url.startswith("https:") else False,
            trust_env=False,
        )

    def call(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """POST with a body, else GET; recorded in `calls`."""
        answer = self.look(path, body)
        self.calls.append(answer)
        return answer

    def look(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """The same without recording it: the call is not part of a sync."""
        started = time.monotonic()
        method = "GET" if body is None else "POST"
        status, reported = 0, {}
        try:
            came = self._client.request(method, path, json=body)
            status, reported = came.status_code, came.json()
        except (httpx.HTTPError, ValueError) as error:
            reported = {"success": False, "message": f"{path}: {self._named(error)}"}
            if explain_tls_error(self.url, str(error), self._certificate):
                reported["lasting"] = True  # waiting does not fix a certificate
        reported = reported if isinstance(reported, dict) else {"answer": reported}
        answer = Answer(path, status, reported, time.monotonic() - started)
        if status == UNAUTHORIZED:
            reported["message"] = f"{answer.why}; set it with --api-key KEY or {KEY_VARIABLE}"
        return answer

    def begin(self, path: str, body: dict[str, Any]) -> Pending:
        return Pending(self, path, body)

    def ranks(self) -> int:
        """The number of the endpoint's ranks in a group; ValueError if it doesn't report it."""
        reported = self.call("/server_info")
        size = reported.body.get("tp_size")
        if reported.status in ABSENT:  # vLLM reports it elsewhere
            size = self.call("/get_world_size").body.get("world_size")
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"{self.url}/server_info has no tp_size: {reported.status} {reported.why}"
            )
        return size

    def ask(self, question: str, secs: float = SHORT_SECS) -> tuple[str, str]:
        """The answer to a chat message, and the version of the weights that generated it."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
            "temperature": 0,
        }
        try:
            came = self._client.post("/v1/chat/completions", json=body, timeout=secs)
            reported = came.json()
            text = str(reported["choices"][0]["message"]["content"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return f"(no answer: {self._named(error)})", ""
        # A proxy reports the version in each answer, a replica only in /model_info.
        version = came.headers.get("x-omni-weight-version")
        reported = self.call("/model_info")
        if reported.status in ABSENT:
            reported = self.call("/weight_info")
        return text, version or str(reported.body.get("weight_version") or "")

    def checksums(self, own: OwnDigest) -> dict[str, str]:
        """The digest over whole tensors of each replica behind the endpoint, by its name.

        vLLM hashes each rank's part. `own(n)` is the digest of the trainer's weights divided into
        the parts of n ranks: if a replica has the same parts, its digest is `own(1)`.
        """
        reported = self.call("/weights_checker", {"action": "checksum"})
        if reported.status in ABSENT:
            return self._vllm_checksums(own)
        replicas = [each for each in _rows(reported.body.get("results")) if "worker" in each]
        if not replicas:
            return {self.url: next(_digests(reported.body), "")}
        return {
            str(each["worker"]): next(_digests(each), "") or _vllm_digest(each.get("body"), own)
            for each in replicas
        }

    def _vllm_checksums(self, own: OwnDigest) -> dict[str, str]:
        reported = self.call("/weight_checker", {"action": "checksum"}).body
        rows = [each for each in _rows(reported.get("results")) if "worker" in each]
        found = {str(each["worker"]): each.get("body") for each in rows} or {self.url: reported}
        return {worker: _vllm_digest(body, own) for worker, body in found.items()}

    def close(self) -> None:
        self._client.close()

    def _named(self, error: Exception) -> str:
        reported = f"{type(error).__name__}: {error}".rstrip(": ")
        return explain_tls_error(self.url, reported, self._certificate) or reported


def _vllm_digest(body: object, own: OwnDigest) -> str:
    """The digest of a worker's checksums; names are like `dp0:pp0:pcp0:tp1:model.norm.weight`."""
    found = body.get("checksums") if isinstance(body, dict) else None
    ranks: dict[str, dict[str, str]] = {}
    for key, digest in found.items() if isinstance(found, dict) else ():
        rank, _, name = str(key).rpartition(":")
        ranks.setdefault(rank, {})[name] = str(digest)
    digest = digest_of_ranks(list(ranks.values()))
    return own(1) if len(ranks) > 1 and digest == own(len(ranks)) else digest


def digest_of_ranks(ranks: Sequence[Mapping[str, str]]) -> str:
    """One digest of the tensors of all ranks; for a single rank, the digest of its tensors."""
    if len(ranks) < 2:
        return roll_up(dict(*ranks))
    return roll_up(
        {f"{number}:{name}": each[name] for number, each in enumerate(ranks) for name in each}
    )


def _cause(body: dict[str, Any]) -> str:
    reported = body.get("message") or body.get("detail") or body.get("error")
    return str(reported.get("message") if isinstance(reported, dict) else reported or body)


def _rows(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _digests(value: object) -> Iterator[str]:
    """Every `full_checksum` at any depth, in order."""
    if isinstance(value, dict):
        if isinstance(found := value.get("full_checksum"), str):
            yield found
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _digests(each)
