import re
import ssl
from dataclasses import replace

import pytest

from omni_proxy.cli.client.admin_client import AdminClient, AdminClientError
from omni_proxy.cli.client.tls_options import (
    ClientCert,
    ClientCertError,
    create_tls_context,
    explain_tls_error,
)
from tests.promises.support.tls_helpers import AUTHORITY, FILES

CLIENT = ClientCert(str(AUTHORITY), str(FILES / "client.pem"), str(FILES / "client-key.pem"))


def test_only_the_given_authority_is_trusted():
    (authority,) = create_tls_context(CLIENT).get_ca_certs()
    assert "authority of the tests" in str(authority["subject"])
    context = create_tls_context(replace(CLIENT, cert="", key=""))
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_the_certificate_of_the_proxy_is_pinned_unless_an_authority_is_given():
    pinned = str(FILES / "server.pem")
    assert not create_tls_context(ClientCert(), pinned).check_hostname
    assert create_tls_context(ClientCert(ca=str(AUTHORITY)), pinned).check_hostname


def test_the_default_context_is_shared_and_not_modified():
    with_certificate = create_tls_context(ClientCert(cert=CLIENT.cert, key=CLIENT.key))
    assert with_certificate is not create_tls_context(ClientCert())
    assert create_tls_context(ClientCert()) is create_tls_context(ClientCert())


def test_a_key_may_be_in_the_file_of_its_certificate(tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes((FILES / "client.pem").read_bytes() + (FILES / "client-key.pem").read_bytes())
    assert create_tls_context(ClientCert(cert=str(both))).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("client_cert", "message"),
    [
        (ClientCert(ca="nowhere.pem"), "--ca nowhere.pem cannot be read: No such file"),
        (ClientCert(ca=CLIENT.key), "--ca .* holds no certificates"),
        (replace(CLIENT, cert=""), "--client-key needs --client-cert"),
        (replace(CLIENT, key=""), "holds no key in PEM form; --client-key FILE"),
        (replace(CLIENT, cert="nowhere"), "--client-cert nowhere cannot be read: No such file"),
        (replace(CLIENT, key="nowhere"), "--client-key nowhere cannot be read: No such file"),
        (replace(CLIENT, key=str(FILES / "server-key.pem")), "is not the key of"),
        (replace(CLIENT, key=str(FILES / "locked-key.pem")), "is encrypted"),
        (replace(CLIENT, cert=CLIENT.key), "--client-cert .* can't be used"),
    ],
)
def test_an_unusable_file_is_reported_with_its_flag(client_cert, message):
    with pytest.raises(ClientCertError, match=message):
        create_tls_context(client_cert)


TLS_FLAGS = ("--ca", CLIENT.ca, "--client-cert", CLIENT.cert, "--client-key", CLIENT.key)


@pytest.mark.parametrize(
    ("url_flag", "url"),
    [
        ((), "https://127.0.0.1:30000"),
        (("--url", "h:1"), "https://h:1"),
        (("--url", ":1"), "https://127.0.0.1:1"),
        (("--url", "https://h"), "https://h"),
        (("--url", "unix:/run/p.sock"), "unix:/run/p.sock"),
    ],
)
def test_a_client_certificate_implies_https_except_for_a_unix_socket(target_of, url_flag, url):
    target = target_of(*url_flag, *TLS_FLAGS)
    assert (target.url, target.client_cert) == (url, CLIENT)


def test_a_client_certificate_requires_tls(target_of, tmp_path):
    with pytest.raises(AdminClientError, match="plain HTTP"):
        target_of("--url", "http://h:1", *TLS_FLAGS)
    file = tmp_path / "proxy.toml"
    file.write_text("[server]\nport = 1\n")
    with pytest.raises(AdminClientError, match="plain HTTP"):
        target_of("--config", file, *TLS_FLAGS)


def test_a_missing_client_certificate_is_reported_before_any_call(target_of, tmp_path):
    file = tmp_path / "proxy.toml"
    tls = f"[server]\ntls_cert = 'c'\ntls_key = 'k'\ntls_client_ca = '{AUTHORITY}'\n"
    file.write_text(tls)
    with pytest.raises(AdminClientError, match=r"authority\.pem\): pass --client-cert"):
        target_of("--config", file)
    assert target_of("--config", file, *TLS_FLAGS).client_cert == CLIENT
    file.write_text(tls + "tls_client_require = false\n")
    assert target_of("--config", file).url.startswith("https:")
    file.write_text(tls + "[admin]\nlisten = 'unix:/run/a.sock'\n")
    assert target_of("--config", file).url == "unix:/run/a.sock"


def test_an_invalid_client_certificate_prevents_any_call(target_of):
    with pytest.raises(AdminClientError, match="--ca nowhere cannot be read: No such file"):
        AdminClient(target_of("--ca", "nowhere"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1)", "does not use TLS"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch, "
         "certificate is not valid for 'h'. (_ssl.c:1)", "for another name"),
        ("[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE] sslv3 alert handshake failure (_ssl.c:1)",
         "pass --client-cert"),
        ("[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired (_ssl.c:1)",
         r"that was sent \(certificate expired\)"),
        ("Connection refused", "^$"),
    ],
)  # fmt: skip
def test_openssl_errors_are_reported_with_a_remedy(error, message):
    assert re.search(message, explain_tls_error("https://h", error, ClientCert()))
