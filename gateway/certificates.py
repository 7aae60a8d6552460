"""The gateway's certificate, which is reloaded for new connections when its files change."""

import asyncio
import os
import ssl
import tempfile
from pathlib import Path

from longleaf.pem import KeyPair, parse_pair
from longleaf.reloading_files import LOOK_SECONDS, ReloadingFiles

KEY_FOLDER = "/tmp"
"""In memory on Kubernetes, unlike the folder of TMPDIR, which has uploads."""


class Certificate:
    """A certificate, its key, and the SSL context that uses them."""

    def __init__(self, tls_cert: str, tls_key: str) -> None:
        """Raises InvalidArgument."""
        self._files: ReloadingFiles[KeyPair] = ReloadingFiles({"tls_cert": tls_cert, "tls_key": tls_key}, parse_pair)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._used = self._files.value
        self._load(self._used)

    async def reload_on_change(self) -> None:
        """Checks the files until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = self._files.value
            if found is not self._used:
                self._used = found
                self._load(found)

    def _load(self, pair: KeyPair) -> None:
        """Uses temporary files, because `ssl` only loads files, and the original ones may be incomplete by now."""
        shared = KEY_FOLDER if os.access(KEY_FOLDER, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="longleaf-", dir=shared) as folder:
            path = Path(folder) / "pair.pem"
            path.touch(0o600)
            path.write_bytes(pair.key + b"\n" + pair.chain)
            self.context.load_cert_chain(path)
