"""The certificate files of a listener: whether they have changed, and what they contain now.

Invariant: only a complete, valid set of files replaces the one in use. An invalid set is logged
once. A set that changes while it is read is not used: the next check reads it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system.files import FileSignatures, file_signatures
from omni_proxy.system.tls_contexts import PemError, listener_tls_files

_log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


class CertificateFiles(Generic[Loaded]):
    """`server` names the files. `load` reads them; it may raise ConfigError, PemError and
    OSError.

    Its methods block: an event loop calls them in a thread, one at a time.
    """

    def __init__(self, server: ServerConfig, load: Callable[[ServerConfig], Loaded]) -> None:
        self.server = server
        self.error = ""  # why the newest files could not be loaded
        self.signatures = self.signatures_now()  # of the files that were last read
        self._load = load

    def signatures_now(self) -> FileSignatures:
        return file_signatures(listener_tls_files(self.server))

    def load(self) -> Loaded:
        """Raises ConfigError, PemError, OSError."""
        return self._load(self.server)

    def reload(self) -> Loaded | None:
        """The new content; None if it has not changed, is invalid, or is being replaced."""
        signatures = self.signatures_now()
        if signatures == self.signatures:
            return None
        file = self.server.tls_cert
        try:
            loaded = self.load()
        except (ConfigError, PemError, OSError) as error:
            _log.error(
                "certificate_reload_failed file=%s error=%s was=certificates_not_reloaded",
                file,
                error,
            )
            self.signatures, self.error = signatures, str(error)
            return None
        if signatures != self.signatures_now():
            return None
        _log.info("certificate_reloaded file=%s", file)
        self.signatures, self.error = signatures, ""
        return loaded
