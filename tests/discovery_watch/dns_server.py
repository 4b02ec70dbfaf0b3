"""A DNS server over UDP and TCP on a loopback address, with a zone that tests define."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import trio

MAX_LINKS = 40  # of CNAMEs in one response


class DnsServer:
    """`zone`: by name and type, the TTL and the records."""

    def __init__(self) -> None:
        self.address = ""
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.additional: list[tuple[str, int, str]] = []  # name, TTL, address
        self.rcodes: dict[str, int] = {}  # by name, instead of records
        self.silent = False
        self.truncated = False
        self.questions: list[tuple[str, str]] = []

    def put(self, name: str, kind: str, *records: str, ttl: int = 1) -> None:
        self.zone[name, kind] = ttl, list(records)

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        listener, socket = await _two_sockets()
        self.address = f"127.0.0.1:{socket.getsockname()[1]}"
        with socket:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._connection, [listener])
                task_status.started()
                while True:
                    data, sender = await socket.recvfrom(65535)
                    response = self._answer(data, udp=True)
                    if response is not None:
                        await socket.sendto(response, sender)

    async def _connection(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
                piece = await stream.receive_some(65536)
                if not piece:
                    return
                data += piece
            response = self._answer(data[2:], udp=False) or b""
            await stream.send_all(len(response).to_bytes(2, "big") + response)

    def _answer(self, data: bytes, *, udp: bool) -> bytes | None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text().rstrip("."), dns.rdatatype.to_text(question.rdtype)
        if udp:
            self.questions.append((name, kind))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if udp and self.truncated:
            response.flags |= dns.flags.TC
            return response.to_wire()
        if name in self.rcodes:
            response.set_rcode(self.rcodes[name])
        else:
            self._resolve(response, question.name, kind)
        return response.to_wire()

    def _resolve(self, response, owner, kind):
        name, links = owner.to_text().rstrip("."), 0
        while (name, "CNAME") in self.zone and links < MAX_LINKS:
            ttl, (target,) = self.zone[name, "CNAME"]
            response.answer.append(dns.rrset.from_text(owner, ttl, "IN", "CNAME", target))
            owner, links = dns.name.from_text(target), links + 1
            name = target.rstrip(".")
        if (name, kind) in self.zone:
            ttl, records = self.zone[name, kind]
            if records:
                response.answer.append(dns.rrset.from_text(owner, ttl, "IN", kind, *records))
            for other, other_ttl, ip in self.additional:
                record = dns.rrset.from_text(dns.name.from_text(other), other_ttl, "IN", "A", ip)
                response.additional.append(record)
        elif not any(known == name for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)


async def _two_sockets() -> tuple[trio.SocketListener, trio.socket.SocketType]:
    """A TCP and a UDP socket with the same port."""
    while True:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        socket = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
        try:
            await socket.bind(listener.socket.getsockname())
        except OSError:
            socket.close()
            await listener.aclose()
        else:
            return listener, socket
