"""Django's DatabaseCache: counters as rows of its own table, on Django's ordinary connection.

A hit reads its rows, decides, and writes each row on the condition that it is still as it was read. Who loses
that race does it again with the rows locked, in the order of their keys, so that nobody waits in a circle. So
a denied hit is one read that locks nothing, a counter that is not contended costs two statements, and one that
is costs its callers a queue and not a storm of retries.
"""

from __future__ import annotations

import base64
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.core.cache import caches
from django.db import (
    Error,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
    router,
    transaction,
)

from ..algorithms import (
    FIXED,
    MICROSECOND,
    SLIDING,
    Counter,
    Unreadable,
    Verdict,
    dump,
    load,
    observe,
    transact,
)
from .base import Entry, Store, StoreError, start_of_keys, unpickle

__all__ = ["DatabaseStore"]

T = TypeVar("T")

_ATTEMPTS = 10
"""The second one waits for its locks and gets them, but for a row that is created in that moment."""
_SWEEP_CHANCE = 1 / 50
_SWEEP_ROWS = 100
"""Together: two expired rows go for each that comes, and a backlog shrinks."""
_PAGE = 1000
_DELETED_AT_ONCE = 500
_LIKE = re.compile(r"[%_!]")


class DatabaseStore(Store):
    """Exact across processes and machines: SQLite, PostgreSQL, MariaDB and MySQL.

    Inside a transaction of the caller it works under a savepoint and what it counted is rolled back with that
    transaction, which is what a TestCase wants and a request does not: the middleware counts outside of
    ATOMIC_REQUESTS. Rows that have expired are removed bit by bit by hits outside of transactions.

    Where the collation of the table has no regard to case, as most of MariaDB and MySQL, callers whose identities
    differ in case alone share a counter.

    A test case that has not been given the database (``databases``) gets Django's own
    ``DatabaseOperationForbidden``, with a note on what to do.
    """

    name = "DatabaseCache"
    round_trips = "1 when denied, else 2; with several counters 3 and 1 for each"

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]

        with _session(cache, now) as session:

            def attempt(is_first: bool) -> list[Verdict]:
                # SQLite can only wait for its lock when a transaction has read nothing yet.
                lock = not is_first or (session.vendor == "sqlite" and not session.is_alone)
                with session.transaction() if lock else session.savepoint():
                    keys, rows, states = session.states(counters, lock)
                    verdicts, writes = transact(counters, states, now)
                    order = sorted(writes, key=keys.__getitem__)
                    with session.transaction() if len(order) > 1 else nullcontext():
                        for position in order:
                            session.write(counters[position], keys[position], rows, writes[position])
                return verdicts

            verdicts = session.persist(attempt)
            if session.is_alone and session.has_inserted and random.random() < _SWEEP_CHANCE:
                session.sweep()
        return verdicts

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        with _session(caches[self.alias], now) as session:
            with session.savepoint():
                states = session.states(counters, lock=False)[2]
            return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache: Any = caches[self.alias]
        made = sorted(str(cache.make_key(key)) for key in keys)
        batches = [made[start : start + _DELETED_AT_ONCE] for start in range(0, len(made), _DELETED_AT_ONCE)]
        with _session(cache) as session:
            return sum(session.delete(batch) for batch in batches)

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache: Any = caches[self.alias]
        start = start_of_keys(cache, prefix)
        last = ""
        while True:
            with _session(cache) as session, session.savepoint():
                page = session.page(start, last)
            for made, value in page:
                # MariaDB compares as its collation says, mostly without regard to case.
                if made.startswith(start):
                    yield Entry(prefix + made[len(start) :], _decode(value))
            if len(page) < _PAGE:
                return
            last = page[-1][0]


class _Outrun(Exception):
    """Another session has changed a row since it was read."""


@contextmanager
def _session(cache: Any, now: int = 0) -> Iterator[_Session]:
    """The cache's table on Django's connection for it. Errors of the database come out as StoreErrors."""
    alias = router.db_for_write(cache.cache_model_class)
    connection: Any = connections[alias]
    try:
        with connection.cursor() as cursor:
            yield _Session(connection, cursor, cache, now)
    except Error as error:
        raise _store_error(error, cache, alias) from error
    except AssertionError as error:
        if type(error).__name__ == "DatabaseOperationForbidden":
            error.add_note(
                f"Rate limits are counted in the database {alias!r}. Give it to the test, with databases = "
                f"{{{alias!r}}} or pytest.mark.django_db(databases=[{alias!r}]), or switch the limits off in it "
                "with ratelimit_kv.testing."
            )
        raise


class _Session:
    """A cursor on the cache's table, as of one moment."""

    def __init__(self, connection: Any, cursor: Any, cache: Any, now: int) -> None:
        self.connection = connection
        self.cursor = cursor
        self.cache = cache
        self.vendor: str = connection.vendor
        self.is_alone: bool = connection.get_autocommit()
        """Whether we are outside of any transaction of the caller."""
        self.has_inserted = False
        self._in_transaction = False
        self._table = connection.ops.quote_name(cache._table)
        self._second = -(-now // MICROSECOND)
        self._alive = self._adapt(self._second)
        """What ``expires`` is not below, where a row is alive."""

    def _adapt(self, second: int) -> Any:
        # As DatabaseCache does, which asks the settings whether USE_TZ is on; a connection knows it too.
        zone = None if self.connection.timezone is None else UTC
        return self.connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(second, zone))

    # ── Transactions ───────────────────────────────────────────────────────────────────────────────────────

    def persist(self, attempt: Callable[[bool], T]) -> T:
        """What ``attempt(is_first)`` returns, as soon as nobody is in its way."""
        for number in range(_ATTEMPTS):
            try:
                return attempt(number == 0)
            except _Outrun:
                continue
            except OperationalError as error:
                # A deadlock ends the transaction; one that is the caller's is not ours to begin again.
                if not self.is_alone or _code(error) not in _CONFLICTS:
                    raise
        raise StoreError(f"outrun by other requests {_ATTEMPTS} times", outage=False)

    def savepoint(self) -> AbstractContextManager[Any]:
        """For reading: an error must not spoil the caller's transaction."""
        return nullcontext() if self.is_alone else self.transaction()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction, unless in one of ours; inside the caller's, a savepoint."""
        if self._in_transaction:
            yield
            return
        self._in_transaction = True
        try:
            if not self.is_alone:
                with transaction.atomic(using=self.connection.alias):
                    yield
                return
            # ``atomic`` would cost more than all the rest on SQLite and a trip or two on MariaDB, and it can't
            # say IMMEDIATE, which waits for SQLite's lock instead of failing where it has to be upgraded.
            self.cursor.execute("BEGIN IMMEDIATE" if self.vendor == "sqlite" else "BEGIN")
            try:
                yield
                self.cursor.execute("COMMIT")
            except BaseException:
                try:
                    self.cursor.execute("ROLLBACK")
                except Error:
                    self.connection.close()  # with whatever was open on it
                raise
        finally:
            self._in_transaction = False

    # ── Statements ─────────────────────────────────────────────────────────────────────────────────────────

    def states(self, counters: Sequence[Counter], lock: bool) -> tuple[list[str], dict[str, str], list[Any]]:
        """Keys as the table has them, the text in the rows that are alive, and the states of the counters."""
        make_key = self.cache.make_key
        keys = [str(make_key(counter.key)) for counter in counters]
        before = [str(make_key(counter.previous)) if counter.kind == SLIDING else "" for counter in counters]
        rows = self._read(sorted({*keys, *filter(None, before)}), lock)
        values = {key: _decode(text) for key, text in rows.items()}
        fold = self._fold
        states = [
            load(counter, values.get(fold(key)), values.get(fold(previous)))
            for counter, key, previous in zip(counters, keys, before, strict=True)
        ]
        return keys, rows, states

    def _fold(self, key: str) -> str:
        # Most collations of MariaDB and MySQL see one key in "user:A" and "user:a"; then there is one row.
        return key.lower() if self.vendor == "mysql" else key

    def _read(self, keys: list[str], lock: bool) -> dict[str, str]:
        where = f"cache_key IN ({', '.join(['%s'] * len(keys))})"
        suffix = ""
        if lock and self.vendor == "sqlite":
            if not self.is_alone:
                # The first statement has to be a write, also when it finds nothing, to wait for the lock.
                self.cursor.execute(f"DELETE FROM {self._table} WHERE {where} AND expires < %s", [*keys, self._alive])
        elif lock:
            # Locked in this order, which is the one in which rows are written. MariaDB locks in the order of its
            # index, which may differ; there a circle costs an immediate deadlock and another attempt.
            order = 'cache_key COLLATE "C"' if self.vendor == "postgresql" else "cache_key"
            suffix = f" ORDER BY {order} FOR UPDATE"
        self.cursor.execute(
            f"SELECT cache_key, value FROM {self._table} WHERE {where} AND expires >= %s{suffix}",
            [*keys, self._alive],
        )
        return {self._fold(key): value for key, value in self.cursor.fetchall()}

    def write(self, counter: Counter, key: str, rows: dict[str, str], state: Any) -> None:
        """Write the state where the row is still as it is in ``rows``, or still not there; else _Outrun."""
        pickled = pickle.dumps(dump(counter, state), self.cache.pickle_protocol)
        value = base64.b64encode(pickled).decode("ascii")
        # The expiry of a window is set once and never moved.
        keep = counter.kind in (FIXED, SLIDING)
        read = rows.get(self._fold(key))
        expires = self._adapt(self._second + counter.ttl) if read is None or not keep else None
        if read is None:
            done = self._insert(key, value, expires)
            self.has_inserted = True
        else:
            # Base64 tells by case, the collations of MariaDB do not.
            same = "CAST(%s AS BINARY)" if self.vendor == "mysql" else "%s"
            assignment = "value = %s" if keep else "value = %s, expires = %s"
            self.cursor.execute(
                f"UPDATE {self._table} SET {assignment} WHERE cache_key = %s AND value = {same} AND expires >= %s",
                [value, *([] if keep else [expires]), key, read, self._alive],
            )
            done = self.cursor.rowcount == 1
        if not done:
            raise _Outrun

    def _insert(self, key: str, value: str, expires: Any) -> bool:
        """A new row, or one that has expired; False when there is one that is alive."""
        alias = "" if self.vendor == "mysql" else " AS old"
        insert = f"INSERT INTO {self._table}{alias} (cache_key, value, expires) VALUES (%s, %s, %s)"
        if self.vendor != "mysql":
            self.cursor.execute(
                f"{insert} ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value,"
                " expires = excluded.expires WHERE old.expires < %s",
                [key, value, expires, self._alive],
            )
            return bool(self.cursor.rowcount == 1)
        if self.is_alone:
            try:
                self.cursor.execute(insert, [key, value, expires])
                return True
            except IntegrityError:
                pass
        else:
            # A row that is dead, only to have its lock: who finds a duplicate with a plain INSERT shares a lock
            # on it with others who do, none of them can then write, and the deadlock ends the caller's
            # transaction.
            insert += " ON DUPLICATE KEY UPDATE cache_key = VALUES(cache_key)"
            self.cursor.execute(insert, [key, "", self._adapt(0)])
        self.cursor.execute(
            f"UPDATE {self._table} SET value = %s, expires = %s WHERE cache_key = %s AND expires < %s",
            [value, expires, key, self._alive],
        )
        return bool(self.cursor.rowcount == 1)

    def delete(self, keys: list[str]) -> int:
        """Remove these rows and say how many there were."""

        def attempt(is_first: bool) -> int:
            with self.savepoint():
                places = ", ".join(["%s"] * len(keys))
                self.cursor.execute(f"DELETE FROM {self._table} WHERE cache_key IN ({places})", keys)
                return int(self.cursor.rowcount)

        return self.persist(attempt)

    def sweep(self) -> None:
        """Remove some of the rows that expired, of whoever: they are dead to everybody."""
        try:
            self.cursor.execute(
                f"SELECT cache_key FROM {self._table} WHERE expires < %s ORDER BY expires LIMIT {_SWEEP_ROWS}",
                [self._alive],
            )
            keys = sorted(key for (key,) in self.cursor.fetchall())
            if keys:
                places = ", ".join(["%s"] * len(keys))
                self.cursor.execute(
                    f"DELETE FROM {self._table} WHERE cache_key IN ({places}) AND expires < %s",
                    [*keys, self._alive],
                )
        except Error:
            pass  # the hit has been counted; somebody else sweeps, or is at it

    def page(self, start: str, last: str) -> list[tuple[str, str]]:
        """The next rows after the key ``last`` whose keys begin with ``start``, by the index on the key."""
        if self.vendor == "sqlite":
            # LIKE has no regard to case there, and so no index; keys are in the order of their characters.
            where, bounds = (
                "cache_key >= %s AND cache_key < %s",
                [start, start[:-1] + chr(ord(start[-1]) + 1)],
            )
        else:
            where, bounds = "cache_key LIKE %s ESCAPE '!'", [_LIKE.sub(r"!\g<0>", start) + "%"]
        self.cursor.execute(
            f"SELECT cache_key, value FROM {self._table} WHERE {where} AND cache_key > %s"
            f" ORDER BY cache_key LIMIT {_PAGE}",
            [*bounds, last],
        )
        return list(self.cursor.fetchall())


def _decode(text: str) -> Any:
    try:
        return unpickle(base64.b64decode(text))
    except ValueError:
        return Unreadable("text that is not Base64")


# ── Errors ─────────────────────────────────────────────────────────────────────────────────────────────────

# SQLSTATE of PostgreSQL, numbers of MariaDB and MySQL. A lock that was waited for in vain is not among them.
_CONFLICTS = frozenset(("40001", "40P01", 1020, 1213))  # serialization, deadlock, record changed, deadlock
_NO_TABLE = frozenset(("42P01", 1146))


def _code(error: Error) -> Any:
    """SQLSTATE, number or text, whatever the driver tells errors apart by."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or (error.args[0] if error.args else "")


def _store_error(error: Error, cache: Any, alias: str) -> StoreError:
    code = _code(error)
    said = " ".join(str(error).split())
    if code in _NO_TABLE or str(code).startswith("no such table"):
        return StoreError(
            f"The table {cache._table!r} is not in the database {alias!r}: run "
            f"manage.py createcachetable --database {alias} ({said})",
            outage=True,
        )
    # In a transaction of the caller "locked" may mean that it began before somebody else's write.
    is_locked = "locked" in said and not connections[alias].get_autocommit()
    outage = isinstance(error, OperationalError | InterfaceError) and code not in _CONFLICTS and not is_locked
    return StoreError(f"{type(error).__name__}: {said}", outage=outage)
