"""Speech sessions over TLS, towards the client and towards the worker."""

import trio
from wsproto.events import BytesMessage

from tests.dataplane.loop_script import until
from tests.dataplane.speech_fixture import (
    CONFIG,
    DONE,
    Worker,
    read_until_close,
    receive_speech,
    request_speech,
    run_proxy,
    serve_speech,
)
from tests.promises.support.tls_helpers import AUTHORITY, client_context, listening, server_context

TLS = listening().removeprefix("[server]\n")
TRUSTED = [{"tls_ca": str(AUTHORITY)}]


class SecureWorker(Worker):
    """A worker with TLS and a certificate for its address."""

    async def start(self, nursery):
        await super().start(nursery)
        self.url = self.url.replace("http:", "https:")

    async def _serve(self, stream):
        secure = trio.SSLStream(stream, server_context(), server_side=True, https_compatible=True)
        await super()._serve(secure)


def over_tls(proxy):
    """Let the clients of this proxy use TLS."""

    async def open_tls_stream():
        raw = await trio.open_tcp_stream(*proxy.address)
        return trio.SSLStream(
            raw, client_context(), server_hostname="localhost", https_compatible=True
        )

    proxy.open_stream = open_tls_stream
    return proxy


async def test_a_session_is_relayed_both_ways_over_tls():
    async with run_proxy(SecureWorker(serve_speech), config=TLS, entries=TRUSTED) as proxy:
        async with over_tls(proxy).client() as client:
            await request_speech(client)
            await receive_speech(client)
        assert await proxy.wait_until_drained() == {"completed": 1}
        assert proxy.counts() == (1, 0)


async def test_a_worker_without_a_trusted_certificate_gets_no_session():
    once = TLS + "[routing]\nmax_total_retries = 1\n"
    worker = SecureWorker(serve_speech)
    async with run_proxy(worker, config=once) as proxy:
        async with over_tls(proxy).client() as client:
            await client.send_text(CONFIG)
            assert (await client.receive_error())["message"] == "upstream WebSocket failed"
        assert worker.requests == []
        assert proxy.health().consecutive_failures == 1


async def test_a_client_that_closes_without_close_notify_ends_the_session():
    worker = SecureWorker(read_until_close)
    async with run_proxy(worker, config=TLS, entries=TRUSTED) as proxy:
        async with over_tls(proxy).client() as client:
            await client.send_text(CONFIG)
            await until(lambda: worker.requests)
            client.stream.transport_stream.socket.close()
        assert await proxy.wait_until_drained() == {"stream_cancelled": 1}
        await worker.session_ended.wait()


async def test_much_audio_arrives_complete_over_tls():
    sound = bytes(100_000)

    async def send_audio(socket):
        await socket.receive_text()
        for _ in range(60):
            await socket.send(BytesMessage(data=sound))
        await socket.send_text(DONE)
        await socket.close()
        await socket.receive_event()

    async with run_proxy(SecureWorker(send_audio), config=TLS, entries=TRUSTED) as proxy:
        async with over_tls(proxy).client() as client:
            await client.send_text(CONFIG)
            await until(lambda: proxy.dataplane.loop.tasks)
            for _ in range(60):
                event = await client.receive_event()
                assert isinstance(event, BytesMessage)
                assert event.data == sound
            assert await client.receive_text() == DONE
            await client.receive_close()
            await client.close()
        assert await proxy.wait_until_drained() == {"completed": 1}
