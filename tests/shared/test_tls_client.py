import ssl
from types import SimpleNamespace

from omni_proxy.shared.tls_client import context_of_the_system


def test_without_authorities_in_the_system_there_are_those_of_httpx(monkeypatch):
    nothing = SimpleNamespace(cafile=None, capath=None)
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nothing)
    context = context_of_the_system()
    assert len(context.get_ca_certs()) > 50
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
