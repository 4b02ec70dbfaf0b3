import ssl

import msgspec
import pytest
import trio

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.downstream import tls_termination
from omni_proxy.dataplane.downstream.tls_termination import Certificates
from tests.dataplane.loop_script import until
from tests.promises.support.tls_helpers import FILES

PAIR = ServerConfig(tls_cert=str(FILES / "server.pem"), tls_key=str(FILES / "server-key.pem"))


@pytest.fixture
def files(tmp_path):
    """A configuration with a certificate and key, a function to replace these, their folder."""

    def write(name):
        for suffix in ("", "-key"):
            pem = (FILES / f"{name}{suffix}.pem").read_bytes()
            (tmp_path / f"server{suffix}.pem").write_bytes(pem)

    write("server")
    server = ServerConfig(tls_cert=f"{tmp_path}/server.pem", tls_key=f"{tmp_path}/server-key.pem")
    return server, write, tmp_path


def test_without_a_certificate_there_is_no_context():
    reloader = Certificates()
    reloader.prepare(ServerConfig())()
    assert (reloader.context, reloader.status()) == (None, None)


def test_the_context_stays_while_the_files_are_the_same():
    reloader = Certificates()
    reloader.prepare(PAIR)()
    first = reloader.context
    reloader.prepare(msgspec.structs.replace(PAIR, port=1))()
    assert reloader.context is first
    reloader.prepare(msgspec.structs.replace(PAIR, tls_client_ca=str(FILES / "authority.pem")))()
    assert reloader.context is not first
    assert reloader.context.verify_mode is ssl.CERT_REQUIRED
    reloader.prepare(ServerConfig())()
    assert reloader.context is None


def test_nothing_changes_before_the_commit_or_after_an_error():
    reloader = Certificates()
    reloader.prepare(PAIR)
    assert reloader.context is None
    reloader.prepare(PAIR)()
    first = reloader.context
    with pytest.raises(ConfigError, match=r"server\.tls_key"):
        reloader.prepare(msgspec.structs.replace(PAIR, tls_key=str(FILES / "renewed-key.pem")))
    assert reloader.context is first


@pytest.fixture
async def polled(files, nursery, monkeypatch):
    monkeypatch.setattr(tls_termination, "POLL_SECS", 0.01)
    reloader = Certificates()
    reloader.prepare(files[0])()
    nursery.start_soon(reloader.run)
    return reloader


async def test_changed_files_are_reloaded(files, polled):
    first = polled.context
    files[1]("renewed")
    await until(lambda: polled.context is not first)
    second = polled.context
    polled.prepare(files[0])()
    assert polled.context is second


async def test_a_broken_pair_is_logged_once_and_replaced_when_it_is_valid_again(
    files, polled, caplog
):
    first = polled.context
    (files[2] / "server-key.pem").write_text("nonsense")
    await until(lambda: polled.error)
    await trio.sleep(0.05)  # it polls several times meanwhile
    assert polled.context is first
    assert "holds no key in PEM form" in polled.status()["error"]
    assert caplog.text.count("certificate_reload_failed") == 1
    files[1]("renewed")
    await until(lambda: polled.context is not first)
    assert polled.status()["error"] is None
