import pytest

from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system.certificate_reload import CertificateFiles


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "cert.pem"
    path.write_text("first")
    return path


def text_of(server):
    with open(server.tls_cert) as file:
        text = file.read()
    if "broken" in text:
        raise ConfigError([Problem("server.tls_cert", None, text)], "")
    return text


def files_of(path, load=text_of):
    return CertificateFiles(ServerConfig(tls_cert=str(path)), load)


def test_changed_files_are_loaded_once(certificate):
    files = files_of(certificate)
    assert files.load() == "first"
    assert files.reload() is None
    certificate.write_text("the second")
    assert files.reload() == "the second"
    assert files.reload() is None


def test_an_invalid_file_is_logged_once_and_its_error_ends_with_a_valid_one(certificate, caplog):
    files = files_of(certificate)
    certificate.write_text("broken file")
    assert (files.reload(), files.reload()) == (None, None)
    assert caplog.text.count("certificate_reload_failed") == 1
    assert "broken file" in files.error
    certificate.write_text("valid again")
    assert files.reload() == "valid again"
    assert files.error == ""


def test_a_file_that_disappears_is_an_error(certificate):
    files = files_of(certificate)
    certificate.unlink()
    assert files.reload() is None
    assert "No such file" in files.error


def test_files_that_are_replaced_while_they_are_read_are_read_again(certificate):
    def load(server):
        text = text_of(server)
        if text == "of the old":
            certificate.write_text("of the new pair")
        return text

    files = files_of(certificate, load)
    certificate.write_text("of the old")
    assert files.reload() is None
    assert files.reload() == "of the new pair"
