import os
import ssl

import pytest

from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system import tls_contexts
from tests.promises.support.tls_helpers import FILES


def server(cert="server", key="server-key", ca=""):
    named = (f"{FILES}/{name}.pem" if name else "" for name in (cert, key, ca))
    return ServerConfig(**dict(zip(("tls_cert", "tls_key", "tls_client_ca"), named, strict=True)))


def test_a_listener_accepts_tls_1_2_and_newer_without_renegotiation():
    context = tls_contexts.server_context(server())
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE


def test_connections_to_workers_refuse_renegotiation_too():
    # The first bytes of a renegotiation would be produced during a read, and never be sent.
    context = tls_contexts.client_context(str(FILES / "authority.pem"), verify=True)
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_a_truncated_connection_is_an_error_on_either_side():
    # Before Python 3.11.4 a truncated response would pass for a complete one.
    to_worker = tls_contexts.client_context("", verify=True)
    for context in (to_worker, tls_contexts.server_context(server())):
        assert not context.options & ssl.OP_IGNORE_UNEXPECTED_EOF


@pytest.mark.parametrize(
    ("config", "key", "reason"),
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
def test_an_unusable_file_is_reported_with_its_key(config, key, reason):
    with pytest.raises(ConfigError) as caught:
        tls_contexts.server_context(config)
    [problem] = caught.value.problems
    assert problem.path == f"server.{key}"
    assert reason in problem.reason
    assert str(getattr(config, key)) in problem.reason


def test_all_unusable_files_are_reported_at_once():
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
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "server.tls_cert", "server.tls_key", "server.tls_worker_ca", "workers[0].tls_ca",
    ]  # fmt: skip
    assert all(line.startswith("proxy.toml: ") for line in lines)
    tls_contexts.check_tls_files(parse(""), "proxy.toml")


@pytest.fixture
def authorities(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_bytes((FILES / "authority.pem").read_bytes())
    return file


def test_a_ca_file_is_read_again_when_it_has_changed(authorities, caplog):
    first = tls_contexts.client_context(str(authorities), verify=True)
    assert (first.verify_mode, first.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert tls_contexts.client_context(str(authorities), verify=True) is first
    authorities.write_bytes((FILES / "stranger.pem").read_bytes())
    second = tls_contexts.client_context(str(authorities), verify=True)
    assert second is not first
    authorities.write_text("nonsense")
    for _ in range(2):
        assert tls_contexts.client_context(str(authorities), verify=True) is second
    assert caplog.text.count("tls_ca_refused") == 1
    os.unlink(authorities)
    assert tls_contexts.client_context(str(authorities), verify=True) is second


def test_a_file_that_was_never_usable_is_an_error(tmp_path):
    with pytest.raises(OSError, match="can't be used"):
        tls_contexts.client_context(f"{tmp_path}/nowhere.pem", verify=True)


def test_the_authorities_of_the_system_are_read_once():
    context = tls_contexts.client_context("", verify=True)
    assert context is tls_contexts.client_context("", verify=True)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_an_unverified_context_checks_neither_chain_nor_name():
    context = tls_contexts.client_context("whatever", verify=False)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (ConnectionError("a reason"), "a reason"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_text_has_no_numbers(error, text):
    assert tls_contexts.tls_error_text(error) == text


def test_errors_in_files_of_the_picker_name_its_own_keys(tmp_path):
    text = f'[picker]\ngrpc_tls_cert = "{tmp_path}/a.pem"\ngrpc_tls_key = "{tmp_path}/b.pem"\n'
    with pytest.raises(ConfigError) as refused:
        tls_contexts.check_tls_files(parse(text), "picker.toml")
    keys = [problem.path for problem in refused.value.problems]
    assert keys == ["picker.grpc_tls_cert", "picker.grpc_tls_key"]
