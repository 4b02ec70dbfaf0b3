"""Speech sessions over TLS, towards the client and towards the worker."""

import trio
from wsproto.events import BytesMessage

from tests.dataplane.loop_script import until
from tests.dataplane.speech_fixture import (
    CONFIG,
    DONE,
    Worker,
    heard_all,
    listen,
    narrate,
    running,
    speak,
)
from tests.promises.tls_helpers import AUTHORITY, believing, listening, showing

TLS = listening().removeprefix("[server]\n")
TRUSTED = [{"tls_ca": str(AUTHORITY)}]


class SecureWorker(Worker):
    """Its handshakes end in a certificate for this address."""

    async def start(self, nursery):
        await super().start(nursery)
        self.url = self.url.replace("http:", "https:")

    async def _serve(self, stream):
        secure = trio.SSLStream(stream, showing(), server_side=True, https_compatible=True)
        await super()._serve(secure)


def over_tls(setting):
    """Its clients speak TLS from now on."""

    async def dial():
        raw = await trio.open_tcp_stream(*setting.address)
        return trio.SSLStream(raw, believing(), server_hostname="localhost", https_compatible=True)

    setting.dial = dial
    return setting


async def test_a_session_passes_both_ways_sealed():
    async with running(SecureWorker(narrate), config=TLS, entries=TRUSTED) as setting:
        async with over_tls(setting).client() as client:
            await speak(client)
            await heard_all(client)
        assert await setting.settled() == {"completed": 1}
        assert setting.counts() == (1, 0)


async def test_a_worker_without_a_trusted_certificate_gets_no_session():
    once = TLS + "[routing]\nmax_total_retries = 1\n"
    worker = SecureWorker(narrate)
    async with running(worker, config=once) as setting:
        async with over_tls(setting).client() as client:
            await client.say(CONFIG)
            assert (await client.error())["message"] == "upstream WebSocket failed"
        assert worker.requests == []
        assert setting.machine().consecutive_failures == 1


async def test_a_client_that_leaves_without_a_word_ends_the_session():
    worker = SecureWorker(listen)
    async with running(worker, config=TLS, entries=TRUSTED) as setting:
        async with over_tls(setting).client() as client:
            await client.say(CONFIG)
            await until(lambda: worker.requests)
            client.stream.transport_stream.socket.close()
        assert await setting.settled() == {"stream_cancelled": 1}
        await worker.over.wait()


async def test_much_audio_waits_for_a_slow_client():
    sound = bytes(100_000)

    async def sing(socket):
        await socket.text()
        for _ in range(60):
            await socket.send(BytesMessage(data=sound))
        await socket.say(DONE)
        await socket.close()
        await socket.event()

    async with running(SecureWorker(sing), config=TLS, entries=TRUSTED) as setting:
        async with over_tls(setting).client() as client:
            await client.say(CONFIG)
            await until(lambda: setting.dataplane.loop.tasks)
            for _ in range(60):
                event = await client.event()
                assert isinstance(event, BytesMessage)
                assert event.data == sound
            assert await client.text() == DONE
            await client.closed()
            await client.close()
        assert await setting.settled() == {"completed": 1}
