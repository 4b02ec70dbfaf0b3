import ssl

import msgspec
import pytest
import trio

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.accept import certificates
from omni_proxy.dataplane.accept.certificates import Certificates
from tests.dataplane.pumping import until
from tests.promises.secure import FILES

PAIR = ServerConfig(tls_cert=str(FILES / "server.pem"), tls_key=str(FILES / "server-key.pem"))


@pytest.fixture
def files(tmp_path):
    """A pair that may be overwritten."""

    def write(name):
        for end in ("", "-key"):
            (tmp_path / f"mine{end}.pem").write_bytes((FILES / f"{name}{end}.pem").read_bytes())

    write("server")
    server = ServerConfig(tls_cert=f"{tmp_path}/mine.pem", tls_key=f"{tmp_path}/mine-key.pem")
    return server, write, tmp_path


def test_without_a_certificate_there_is_no_context():
    held = Certificates()
    held.prepare(ServerConfig())()
    assert (held.context, held.status()) == (None, None)


def test_the_same_files_keep_their_context_whatever_else_changes():
    held = Certificates()
    held.prepare(PAIR)()
    first = held.context
    held.prepare(msgspec.structs.replace(PAIR, port=1))()
    assert held.context is first
    held.prepare(msgspec.structs.replace(PAIR, tls_client_ca=str(FILES / "authority.pem")))()
    assert held.context is not first
    assert held.context.verify_mode is ssl.CERT_REQUIRED
    held.prepare(ServerConfig())()
    assert held.context is None


def test_nothing_changes_before_the_commit_nor_by_a_refusal():
    held = Certificates()
    held.prepare(PAIR)
    assert held.context is None
    held.prepare(PAIR)()
    first = held.context
    with pytest.raises(ConfigError, match=r"server\.tls_key"):
        held.prepare(msgspec.structs.replace(PAIR, tls_key=str(FILES / "renewed-key.pem")))
    assert held.context is first


@pytest.fixture
async def watched(files, nursery, monkeypatch):
    monkeypatch.setattr(certificates, "LOOK_SECS", 0.01)
    held = Certificates()
    held.prepare(files[0])()
    nursery.start_soon(held.run)
    return held


async def test_files_that_change_are_read_anew(files, watched):
    first = watched.context
    files[1]("renewed")
    await until(lambda: watched.context is not first)
    second = watched.context
    watched.prepare(files[0])()
    assert watched.context is second


async def test_a_broken_pair_is_told_of_once_and_forgotten_when_it_is_mended(
    files, watched, caplog
):
    first = watched.context
    (files[2] / "mine-key.pem").write_text("nonsense")
    await until(lambda: watched.error)
    await trio.sleep(0.05)  # it looks again and again meanwhile
    assert watched.context is first
    assert "holds no key in PEM form" in watched.status()["error"]
    assert caplog.text.count("the renewed certificate is refused") == 1
    files[1]("renewed")
    await until(lambda: watched.context is not first)
    assert watched.status()["error"] is None
