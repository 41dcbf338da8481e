"""DatabaseStore on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from tests.stores.contract import IDENTITIES, StoreContract


class TestSQLite(StoreContract):
    kind = "database-sqlite"


class TestPostgreSQL(StoreContract):
    kind = "database-postgresql"


class TestMariaDB(StoreContract):
    kind = "database-mariadb"
    # Its collations mostly have no regard to case, and the key of Django's table is one of them.
    identities = tuple(identity for identity in IDENTITIES if identity != "user:A_B")
