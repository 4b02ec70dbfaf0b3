import os
import ssl

import pytest

from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system import tls_contexts
from tests.promises.secure import FILES


def server(cert="server", key="server-key", ca=""):
    named = (f"{FILES}/{name}.pem" if name else "" for name in (cert, key, ca))
    return ServerConfig(**dict(zip(("tls_cert", "tls_key", "tls_client_ca"), named, strict=True)))


def test_a_listener_speaks_tls_1_2_and_newer_and_http_1_1_alone():
    context = tls_contexts.server_context(server())
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE


def test_workers_are_not_renegotiated_with_either():
    # Its first words would be written while we read, and nobody would send them.
    context = tls_contexts.client_context(str(FILES / "authority.pem"), verify=True)
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_a_connection_that_was_cut_is_no_end_on_either_side():
    # As the first Pythons 3.11 have it. A shortened answer would pass for a whole one.
    towards = tls_contexts.client_context("", verify=True)
    for context in (towards, tls_contexts.server_context(server())):
        assert not context.options & ssl.OP_IGNORE_UNEXPECTED_EOF


@pytest.mark.parametrize(
    ("asked", "key", "words"),
    [
        (server(cert="nowhere"), "tls_cert", "cannot be read: No such file"),
        (server(key="nowhere"), "tls_key", "cannot be read: No such file"),
        (server(cert="server-key"), "tls_cert", "holds no certificate in PEM form"),
        (server(key="server"), "tls_key", "holds no key in PEM form"),
        (server(key="renewed-key"), "tls_key", "is not the key of the certificate in"),
        (server(key="locked-key"), "tls_key", "is encrypted"),
        (server(ca="nowhere"), "tls_client_ca", "cannot be read"),
        (server(ca="server-key"), "tls_client_ca", "holds no certificates in PEM form"),
    ],
)
def test_what_can_not_be_used_is_named_with_its_key(asked, key, words):
    with pytest.raises(ConfigError) as caught:
        tls_contexts.server_context(asked)
    [problem] = caught.value.problems
    assert problem.path == f"server.{key}"
    assert words in problem.reason
    assert str(getattr(asked, key)) in problem.reason


def test_everything_that_is_wrong_with_the_files_is_told_at_once():
    config = parse(
        f"""[server]
tls_cert = '{FILES}/a.pem'
tls_key = '{FILES}/b.pem'
tls_worker_ca = '{FILES}/c.pem'
[[workers]]
url = 'https://h'
tls_ca = '{FILES}/server-key.pem'
"""
    )
    with pytest.raises(ConfigError) as caught:
        tls_contexts.check_tls_files(config, "proxy.toml")
    told = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in told] == [
        "server.tls_cert", "server.tls_key", "server.tls_worker_ca", "workers[0].tls_ca",
    ]  # fmt: skip
    assert all(line.startswith("proxy.toml: ") for line in told)
    tls_contexts.check_tls_files(parse(""), "proxy.toml")


@pytest.fixture
def authorities(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_bytes((FILES / "authority.pem").read_bytes())
    return file


def test_a_file_of_authorities_is_read_again_when_it_has_changed(authorities, caplog):
    first = tls_contexts.client_context(str(authorities), verify=True)
    assert (first.verify_mode, first.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert tls_contexts.client_context(str(authorities), verify=True) is first
    authorities.write_bytes((FILES / "stranger.pem").read_bytes())
    second = tls_contexts.client_context(str(authorities), verify=True)
    assert second is not first
    authorities.write_text("nonsense")
    for _ in range(2):
        assert tls_contexts.client_context(str(authorities), verify=True) is second
    assert caplog.text.count("can't be used any more") == 1
    os.unlink(authorities)
    assert tls_contexts.client_context(str(authorities), verify=True) is second


def test_a_file_that_was_never_usable_is_an_error(tmp_path):
    with pytest.raises(OSError, match="can't be used"):
        tls_contexts.client_context(f"{tmp_path}/nowhere.pem", verify=True)


def test_the_systems_authorities_are_read_once():
    context = tls_contexts.client_context("", verify=True)
    assert context is tls_contexts.client_context("", verify=True)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_without_verification_nobody_is_asked_who_he_is():
    context = tls_contexts.client_context("whatever", verify=False)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (ConnectionError("so it is"), "so it is"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_reason_is_told_without_numbers(error, words):
    assert tls_contexts.tls_error_text(error) == words
