import socket
import threading

import pytest

from omni_proxy.cli.client.admin_client import (
    AdminClient,
    AdminClientError,
    AdminReply,
    AdminTarget,
    with_default_command,
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "proxy.toml"


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://h:1/", "http://h:1"),
        ("h:1", "http://h:1"),
        (":1", "http://127.0.0.1:1"),
        ("https://h/proxy/", "https://h/proxy"),
        ("unix:/run/p.sock", "unix:/run/p.sock"),
    ],
)
def test_a_url_may_be_abbreviated(target_of, typed, url):
    assert target_of("--url", typed).url == url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("::", "http://[::1]:8123"),
        ("fe80::1", "http://[fe80::1]:8123"),
        ("[::]", "http://[::1]:8123"),
        ("proxy.local", "http://proxy.local:8123"),
    ],
)
def test_the_address_comes_from_the_configuration_file(target_of, file, host, url):
    file.write_text(f'[server]\nhost = "{host}"\nport = 8123\n')
    assert target_of("--config", file).url == url


@pytest.mark.parametrize(
    ("tables", "url"),
    [
        ("[server]\nhost = 'unix:/run/p.sock'", "unix:/run/p.sock"),
        ("[admin]\nlisten = 'unix:/run/a.sock'", "unix:/run/a.sock"),
        ("[admin]\nlisten = '0.0.0.0:9'", "http://127.0.0.1:9"),
        ("[admin]\nlisten = '[::1]:9'", "http://[::1]:9"),
        ("[server]\nport = 0\n[admin]\nlisten = 'h:9'", "http://h:9"),
    ],
)
def test_the_admin_listener_is_the_target_if_one_is_configured(target_of, file, tables, url):
    file.write_text(tables)
    assert target_of("--config", file).url == url


def test_a_proxy_with_tls_is_verified_against_the_certificate_in_its_configuration(target_of, file):
    file.write_text("[server]\ntls_cert = 'c.pem'\ntls_key = 'k.pem'\n")
    target = target_of("--config", file)
    assert (target.url, target.certificate) == ("https://127.0.0.1:30000", "c.pem")
    with pytest.raises(AdminClientError, match=r"c\.pem cannot be read: No such file"):
        AdminClient(target)


def test_without_arguments_the_target_is_the_default_address(target_of):
    assert target_of() == AdminTarget("http://127.0.0.1:30000")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", "list"),
        ("-h", "-h"),
        ("drain a --wait", "drain a --wait"),
        ("--config f drain a --wait", "drain --config f a --wait"),
        ("--config=f --json drain a", "drain --config=f --json a"),
        ("--url list", "list --url list"),
        ("--url h --api-key drain", "list --url h --api-key drain"),
        (
            "--ca f --client-cert g --client-key h add a",
            "add --ca f --client-cert g --client-key h a",
        ),
        ("--url h -h", "list --url h -h"),
        ("--model m", "list --model m"),
        ("--model drain", "list --model drain"),
    ],
)
def test_a_command_may_follow_the_target_options(typed, expected):
    assert with_default_command(typed.split(), "list") == expected.split()


def test_a_file_with_port_0_needs_a_url(target_of, file):
    file.write_text("[server]\nport = 0\n")
    with pytest.raises(AdminClientError, match=r"any free port.*--url"):
        target_of("--config", file)


def test_a_broken_file_reports_its_problems(target_of, file):
    file.write_text("[server]\nprot = 1\n")
    with pytest.raises(AdminClientError, match=r"proxy.toml:2: server.prot: unknown key"):
        target_of("--config", file)


def test_a_key_is_from_the_command_line_the_file_or_the_environment(target_of, file, monkeypatch):
    file.write_text('[admin]\napi_key = "of the file"\n')
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", "of the environment")
    typed = target_of("--config", file, "--api-key", "typed")
    assert (typed.key, typed.key_from) == ("typed", "--api-key")
    assert target_of("--config", file).key == "of the file"
    from_environment = target_of("--url", "h:1")
    assert (from_environment.key, from_environment.key_from) == (
        "of the environment",
        "SGLANG_OMNI_ADMIN_KEY",
    )


def get_feed(url, key=""):
    with AdminClient(AdminTarget(url, key, "--api-key" if key else "")) as proxy:
        return proxy.get("/feed")


def test_a_reply_has_the_reason_of_a_refusal(proxy):
    proxy.replies["/feed"] = (200, {"ready": True})
    assert get_feed(proxy.url) == AdminReply(200, {"ready": True})
    assert get_feed(proxy.url).refusal == ""
    proxy.replies["/feed"] = (503, {"error": {"message": "full", "code": "too_many_readers"}})
    assert get_feed(proxy.url).refusal == "full"
    proxy.replies["/feed"] = (502, {"results": []})
    assert get_feed(proxy.url).refusal == "status 502"


def test_keys_that_the_file_names_are_read_from_the_environment(target_of, file, monkeypatch):
    monkeypatch.setenv("READ", "r")
    monkeypatch.setenv("OPERATE", "o")
    keys = "".join(
        f'[[admin.keys]]\nname = "{name}"\nkey_env = "{name.upper()}"\nrole = "{name}"\n'
        for name in ("read", "all", "operate")
    )
    file.write_text(f'[server]\napi_key = "of-clients"\n{keys}')
    target = target_of("--config", file)
    assert (target.key, target.key_from) == ("o", "OPERATE")
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", "e")
    assert target_of("--config", file).key == "e"


def test_a_missing_or_wrong_key_is_reported_with_a_remedy(proxy):
    proxy.replies["/feed"] = (401, {"error": {"message": "m", "code": "admin_key_required"}})
    with pytest.raises(AdminClientError, match="requires the admin key: pass --api-key"):
        get_feed(proxy.url)
    error = {"message": "m", "code": "role_not_allowed"}
    proxy.replies["/feed"] = (403, {"error": error, "role": "read", "roles": ["a", "all"]})
    message = "the admin key from --api-key has the role read; this needs a or all"
    with pytest.raises(AdminClientError, match=message):
        get_feed(proxy.url, "k")
    proxy.replies["/feed"] = (403, {"error": {"message": "m", "code": "admin_key_invalid"}})
    with pytest.raises(AdminClientError, match="rejects the admin key from --api-key"):
        get_feed(proxy.url, "käse")
    assert proxy.requests[-1][2].encode("latin-1") == "Bearer käse".encode()


@pytest.mark.parametrize(
    "reply",
    [(200, b"<html>"), (404, {"detail": "Not Found"}), (200, []), (404, b"")],
)
def test_a_server_that_is_not_an_omni_proxy_is_reported(proxy, reply):
    proxy.replies["/feed"] = reply
    with pytest.raises(AdminClientError, match="is not an omni-proxy"):
        get_feed(proxy.url)


def test_a_refused_connection_suggests_the_url_flag():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            AdminClientError, match=r"cannot connect to \S+ \(Connection refused\).*--url"
        ):
            get_feed(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://h:99999999", "cannot connect to http://h:99999999 "),
        ("http://[::1", r"http://\[::1 is not a URL: Invalid port"),
        ("ftp://h:1", "unsupported protocol 'ftp://'"),
        ("http://a b", "cannot connect to http://a b "),
    ],
)
def test_an_invalid_url_is_reported(url, reason):
    with pytest.raises(AdminClientError, match=reason):
        get_feed(url)


def test_a_silent_server_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            AdminClient(AdminTarget(url), 0.05) as proxy,
            pytest.raises(AdminClientError, match="in time"),
        ):
            proxy.get("/feed")


def test_a_unix_socket_is_a_target(tmp_path):
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(30)

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert get_feed(f"unix:{path}").body == {}
        thread.join()


def test_the_lines_of_a_stream_are_read_and_its_refusal_is_raised(proxy):
    proxy.replies["/feed"] = (200, b"data: 1\n\ndata: 2\n")
    with AdminClient(AdminTarget(proxy.url)) as client, client.lines("/feed") as lines:
        assert [line for line in lines if line] == ["data: 1", "data: 2"]
    proxy.replies["/feed"] = (503, {"error": {"message": "32 readers are served already"}})
    raises_refusal = pytest.raises(AdminClientError, match="32 readers")
    with AdminClient(AdminTarget(proxy.url)) as client, raises_refusal, client.lines("/feed"):
        pass
