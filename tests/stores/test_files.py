"""FileStore in a directory of FileBasedCache."""

from __future__ import annotations

from tests.stores.contract import StoreContract


class TestFiles(StoreContract):
    kind = "filebased"
