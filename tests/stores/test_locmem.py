"""LocMemStore."""

from __future__ import annotations

from tests.stores.contract import StoreContract


class TestLocMem(StoreContract):
    kind = "locmem"
