"""TLS for the bench: a certificate, and a bridge between the load, which has no TLS, and a side.

The bridge is a separate HAProxy that only encrypts and decrypts, one upstream connection for each
client connection. Every leg has the same bridge, and its CPU time is not counted.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.bench.harness.processes import running

BRIDGE_CONFIG = """\
global
    nbthread 1
    maxconn 8192
defaults
    mode tcp
    timeout connect 5s
    timeout client 75s
    timeout server 75s
listen bridge
    bind 127.0.0.1:{port}
    server side 127.0.0.1:{target} ssl verify none
"""


class NoTools(Exception):
    """TLS can't be measured on this machine; the message has the missing program."""


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key (ECDSA P-256)."""
    program = shutil.which("openssl")
    if program is None:
        raise NoTools("TLS is measured with the programs openssl and haproxy; openssl is missing")
    cert, key = folder / "cert.pem", folder / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    names = ("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        [program, "req", "-x509", *curve, "-nodes", "-days", "2", *names,
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@contextmanager
def bridge(port: int, target: int, folder: Path) -> Iterator[None]:
    """Forward plain connections to `port` over TLS to `target`."""
    program = shutil.which("haproxy")
    if program is None:
        raise NoTools("TLS is measured with the programs openssl and haproxy; haproxy is missing")
    config = folder / "bridge.cfg"
    config.write_text(BRIDGE_CONFIG.format(port=port, target=target))
    with (
        (folder / "bridge.log").open("w") as log,
        running([program, "-db", "-f", str(config)], log),
    ):
        yield
