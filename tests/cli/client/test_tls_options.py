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
from tests.promises.tls_helpers import AUTHORITY, FILES

CLIENT = ClientCert(str(AUTHORITY), str(FILES / "client.pem"), str(FILES / "client-key.pem"))


def test_one_authority_is_believed_in_and_no_other():
    (believed,) = create_tls_context(CLIENT).get_ca_certs()
    assert "authority of the tests" in str(believed["subject"])
    context = create_tls_context(replace(CLIENT, cert="", key=""))
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_the_certificate_of_the_proxys_file_is_believed_in_unless_an_authority_is_named():
    pinned = str(FILES / "server.pem")
    assert not create_tls_context(ClientCert(), pinned).check_hostname
    assert create_tls_context(ClientCert(ca=str(AUTHORITY)), pinned).check_hostname


def test_the_systems_authorities_are_nobodys_to_change():
    with_own = create_tls_context(ClientCert(cert=CLIENT.cert, key=CLIENT.key))
    assert with_own is not create_tls_context(ClientCert())
    assert create_tls_context(ClientCert()) is create_tls_context(ClientCert())


def test_a_key_may_be_in_the_file_of_its_certificate(tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes((FILES / "client.pem").read_bytes() + (FILES / "client-key.pem").read_bytes())
    assert create_tls_context(ClientCert(cert=str(both))).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("client_cert", "words"),
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
def test_a_file_that_can_not_be_used_is_reported_with_its_flag(client_cert, words):
    with pytest.raises(ClientCertError, match=words):
        create_tls_context(client_cert)


WORDS = ("--ca", CLIENT.ca, "--client-cert", CLIENT.cert, "--client-key", CLIENT.key)


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ((), "https://127.0.0.1:30000"),
        (("--url", "h:1"), "https://h:1"),
        (("--url", ":1"), "https://127.0.0.1:1"),
        (("--url", "https://h"), "https://h"),
        (("--url", "unix:/run/p.sock"), "unix:/run/p.sock"),
    ],
)
def test_a_client_certificate_implies_https(place, where, url):
    found = place(*where, *WORDS)
    assert (found.url, found.client_cert) == (url, CLIENT)


def test_a_client_certificate_requires_tls(place, tmp_path):
    with pytest.raises(AdminClientError, match="plain HTTP"):
        place("--url", "http://h:1", *WORDS)
    file = tmp_path / "proxy.toml"
    file.write_text("[server]\nport = 1\n")
    with pytest.raises(AdminClientError, match="plain HTTP"):
        place("--config", file, *WORDS)


def test_a_missing_client_certificate_is_reported_before_any_call(place, tmp_path):
    file = tmp_path / "proxy.toml"
    tls = f"[server]\ntls_cert = 'c'\ntls_key = 'k'\ntls_client_ca = '{AUTHORITY}'\n"
    file.write_text(tls)
    with pytest.raises(AdminClientError, match=r"authority\.pem\): pass --client-cert"):
        place("--config", file)
    assert place("--config", file, *WORDS).client_cert == CLIENT
    file.write_text(tls + "tls_client_require = false\n")
    assert place("--config", file).url.startswith("https:")
    file.write_text(tls + "[admin]\nlisten = 'unix:/run/a.sock'\n")
    assert place("--config", file).url == "unix:/run/a.sock"


def test_an_invalid_client_certificate_prevents_any_call(place):
    with pytest.raises(AdminClientError, match="--ca nowhere cannot be read: No such file"):
        AdminClient(place("--ca", "nowhere"))


@pytest.mark.parametrize(
    ("message", "words"),
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
def test_openssl_errors_are_reported_with_a_remedy(message, words):
    assert re.search(words, explain_tls_error("https://h", message, ClientCert()))
