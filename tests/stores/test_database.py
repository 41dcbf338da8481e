"""DatabaseStore on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.db import DatabaseError, connections, router, transaction
from django.test import SimpleTestCase
from django.test.utils import CaptureQueriesContext
from freezegun import freeze_time

from ratelimit_kv.algorithms import FORCE
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import StoreError, database
from tests import caches
from tests.caches import COUNTERS, DATABASE_KINDS, TABLE
from tests.stores.bench import SECOND, Bench, counter, in_processes, in_threads, microseconds, refund
from tests.stores.contract import IDENTITIES, StoreContract


class TestSQLite(StoreContract):
    kind = "database-sqlite"


class TestPostgreSQL(StoreContract):
    kind = "database-postgresql"


class TestMariaDB(StoreContract):
    kind = "database-mariadb"
    # Its collations mostly have no regard to case, and the key of Django's table is one of them.
    identities = tuple(identity for identity in IDENTITIES if identity != "user:A_B")


@pytest.fixture(params=DATABASE_KINDS)
def bench(request: pytest.FixtureRequest, use_cache: Callable[..., Any]) -> Bench:
    return Bench(request.param, use_cache(request.param))


@pytest.fixture
def sqlite(use_cache: Callable[..., Any]) -> Bench:
    return Bench("database-sqlite", use_cache("database-sqlite"))


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.random, "random", lambda: 1.0)


def connection() -> Any:
    return connections[COUNTERS]


@contextmanager
def statements() -> Iterator[list[str]]:
    """The statements that are executed meanwhile, transactions included."""
    heard: list[str] = []
    with CaptureQueriesContext(connection()) as context:
        yield heard
    heard += [query["sql"].split()[0] for query in context.captured_queries]


# ── What a hit costs ───────────────────────────────────────────────────────────────────────────────────────


def test_statements_of_a_hit(bench: Bench) -> None:
    now = microseconds()
    one = counter(now=now, limit=2)
    three = [counter(now=now, limit=2, scope=scope) for scope in "abc"]

    def heard(look: Callable[..., Any], *hits: Any) -> list[str]:
        with statements() as found:
            look(*hits, now=now)
        return found

    assert heard(bench.hit, one) == ["SELECT", "INSERT"]
    assert heard(bench.hit, one) == ["SELECT", "UPDATE"]
    assert heard(bench.hit, one) == ["SELECT"], "a denied hit locks nothing"
    assert heard(bench.hit, *three) == ["SELECT", "BEGIN", "INSERT", "INSERT", "INSERT", "COMMIT"]
    assert heard(bench.hit, *three) == ["SELECT", "BEGIN", "UPDATE", "UPDATE", "UPDATE", "COMMIT"]
    assert heard(bench.hit, *three, one) == ["SELECT"]
    assert heard(bench.peek, *three, one) == ["SELECT"]
    assert heard(bench.hit, refund(counter("user:nobody"))) == ["SELECT"]


def test_who_is_outrun_locks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = microseconds()
    hits = [counter(now=now, limit=9, scope=scope) for scope in "ab"]
    bench.hit(*hits, now=now)
    read = database._Session._read
    lock_of_each_read = []

    def read_and_be_outrun(session: Any, keys: list[str], lock: bool) -> dict[str, str]:
        rows = read(session, keys, lock)
        lock_of_each_read.append(lock)
        if not lock:
            cache.set(hits[1].key, 5, 300)
        return rows

    monkeypatch.setattr(database._Session, "_read", read_and_be_outrun)
    with statements() as heard:
        verdicts = bench.hit(*hits, now=now)
    assert [verdict.used for verdict in verdicts] == [2, 6]
    assert lock_of_each_read == [False, True]
    assert heard[-5:] == ["BEGIN", "SELECT", "UPDATE", "UPDATE", "COMMIT"]


def test_a_row_that_comes_or_goes_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hit = counter(limit=9)
    read = database._Session._read
    happens: list[Callable[[], Any]] = [
        lambda: cache.set(hit.key, 5, 300),
        lambda: cache.delete(hit.key),
        lambda: cache.set(hit.key, 7, 300),
    ]

    def read_and_be_outrun(session: Any, keys: list[str], lock: bool) -> dict[str, str]:
        rows = read(session, keys, lock)
        if happens and not lock:
            happens.pop(0)()
        return rows

    monkeypatch.setattr(database._Session, "_read", read_and_be_outrun)
    assert [bench.hit(hit)[0].used for _ in range(3)] == [6, 1, 8]


def test_it_gives_up_when_it_is_outrun_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def outrun(*args: Any) -> None:
        raise database._Outrun

    monkeypatch.setattr(database._Session, "write", outrun)
    with pytest.raises(StoreError, match="outrun") as caught:
        bench.hit(counter(), counter(scope="other"))
    assert not caught.value.outage
    assert bench.keys() == []


def test_an_expired_row_is_as_good_as_none(bench: Bench) -> None:
    now = microseconds()
    old, fresh = counter("user:1", now=now), counter("user:2", now=now)
    with freeze_time("2020-01-01"):
        cache.set(old.key, 99, 60)
        cache.set(counter(kind="b", now=now).key, 99, 60)
    for _ in range(4):
        bench.hit(old, fresh, counter(kind="b", now=now), now=now)
    assert bench.used(old, fresh, counter(kind="b", now=now), now=now) == [3, 3, 3]
    assert cache.get(old.key) == 3


def test_case_makes_no_difference_on_mariadb(use_cache: Callable[..., Any]) -> None:
    bench = Bench("database-mariadb", use_cache("database-mariadb"))
    now = microseconds()
    small, large = counter("user:abc", now=now), counter("user:ABC", now=now)
    assert [bench.hit(hit, now=now)[0].used for hit in (small, large, small, large)] == [1, 2, 3, 3]


def test_a_table_in_a_schema(use_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("database-postgresql", use_cache("database-postgresql"))
    monkeypatch.setattr(bench.cache, "_table", f'"public"."{TABLE}"')  # which createcachetable can't make
    hits = [counter(), counter(kind="b"), counter(kind="s")]
    for used in (1, 2, 3):
        assert [verdict.used for verdict in bench.hit(*hits)] == [used] * 3
    assert len(bench.keys()) == 3


@pytest.mark.parametrize("aware", [True, False])
def test_time_zones(bench: Bench, settings: Any, aware: bool) -> None:
    settings.USE_TZ = aware
    settings.TIME_ZONE = "Asia/Kathmandu"
    hit = counter(limit=2, ttl=100)
    assert bench.admitted([hit] * 3) == 2
    assert cache.get(hit.key) == 2
    assert 95 <= bench.seconds_left(hit.key) <= 102
    later = hit.end + 200 * SECOND
    assert bench.used(hit, now=later) == [0]


# ── Transactions of the caller ─────────────────────────────────────────────────────────────────────────────


def test_counters_roll_back_with_the_transaction_around_them(bench: Bench) -> None:
    now = microseconds()
    hits = [counter(now=now, limit=2, scope=scope) for scope in "ab"]
    bench.hit(*hits, now=now)
    for _ in range(2):
        with transaction.atomic(using=COUNTERS):
            assert [bench.hit(*hits, now=now)[0].allowed for _ in range(3)] == [True, False, False]
            assert bench.used(*hits, now=now) == [2, 2]
            transaction.set_rollback(True, using=COUNTERS)
        assert bench.used(*hits, now=now) == [1, 1]
    with transaction.atomic(using=COUNTERS):
        bench.hit(*hits, now=now)
    assert bench.used(*hits, now=now) == [2, 2]


# With SQLite and no autocommit, Django lets each savepoint that is not inside an atomic block commit.
@pytest.mark.parametrize("kind", ["database-postgresql", "database-mariadb"])
def test_without_autocommit(kind: str, use_cache: Callable[..., Any]) -> None:
    bench = Bench(kind, use_cache(kind))
    connection().set_autocommit(False)
    try:
        bench.hit(counter(), counter(scope="other"))
        connection().rollback()
        assert bench.used(counter()) == [0]
        bench.hit(counter(), counter(scope="other"))
        connection().commit()
    finally:
        connection().set_autocommit(True)
    assert bench.used(counter()) == [1]


def test_an_error_leaves_the_transaction_around_it_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic(using=COUNTERS):
        cache.set("theirs", 1, 300)
        monkeypatch.setattr(bench.cache, "_table", "no_such_table")
        for look in (bench.hit, bench.peek):
            with pytest.raises(StoreError):
                look(counter())
        with pytest.raises(StoreError):
            bench.store.reset(["key"])
        with pytest.raises(StoreError):
            list(bench.store.scan("rl:"))
        monkeypatch.undo()
        assert cache.get("theirs") == 1
        bench.hit(counter())
    assert bench.used(counter()) == [1]


def test_a_transaction_that_is_broken_already(bench: Bench) -> None:
    with transaction.atomic(using=COUNTERS):
        transaction.set_rollback(True, using=COUNTERS)
        connection().needs_rollback = True
        with pytest.raises(StoreError, match="TransactionManagementError") as caught:
            bench.hit(counter())
        assert not caught.value.outage


def test_exact_inside_transactions(bench: Bench) -> None:
    hit = counter(limit=20)

    def work(thread: int) -> int:
        admitted = 0
        for _ in range(10):
            with transaction.atomic(using=COUNTERS):
                admitted += bench.hit(hit)[0].allowed
        return admitted

    assert sum(in_threads(4, work)) == 20
    assert bench.used(hit) == [20]


def test_a_test_case_without_the_database_gets_a_hint(bench: Bench) -> None:
    class Forgetful(SimpleTestCase):
        def test_hit(self) -> None:
            bench.hit(counter())

        def test_peek(self) -> None:
            bench.peek(counter())

    caught: list[BaseException] = []

    class Result(unittest.TestResult):
        def addFailure(self, test: Any, error: Any) -> None:
            caught.append(error[1])

    unittest.defaultTestLoader.loadTestsFromTestCase(Forgetful).run(Result())
    assert [type(error).__name__ for error in caught] == ["DatabaseOperationForbidden"] * 2
    assert COUNTERS in caught[0].__notes__[0]
    assert "databases" in caught[0].__notes__[0]


def test_other_assertions_have_no_hint(sqlite: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("something else")

    monkeypatch.setattr(database._Session, "states", fail)
    with pytest.raises(AssertionError, match="something else") as caught:
        sqlite.hit(counter())
    assert not hasattr(caught.value, "__notes__")


# ── SQLite as people have it ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["as Django has it", "in transactions"])
def test_sqlite_without_any_options(how: str, use_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = caches.database_settings

    def bare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**whole(*args, **kwargs), "OPTIONS": {}}

    monkeypatch.setattr(caches, "database_settings", bare)
    bench = Bench("database-sqlite", use_cache("database-sqlite"))
    hits = [counter(limit=60), counter(limit=60, scope="other")]
    if how == "in transactions":

        def work(thread: int) -> int:
            admitted = 0
            for _ in range(20):
                with transaction.atomic(using=COUNTERS):
                    admitted += bench.hit(*hits)[0].allowed
            return admitted

        assert sum(in_threads(4, work)) == 60
    else:
        assert in_processes([hits] * 4, 30).admitted == 60
    assert bench.used(*hits) == [60, 60]


def test_sqlite_that_stays_locked(use_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = caches.database_settings
    monkeypatch.setattr(
        caches, "database_settings", lambda *args, **kwargs: {**whole(*args, **kwargs), "OPTIONS": {"timeout": 0.05}}
    )
    bench = Bench("database-sqlite", use_cache("database-sqlite"))
    locked, over = threading.Event(), threading.Event()

    def lock() -> None:
        with connection().cursor() as cursor:
            cursor.execute("BEGIN EXCLUSIVE")
            locked.set()
            over.wait(20)
            cursor.execute("ROLLBACK")
        connection().close()

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        assert locked.wait(20)
        with pytest.raises(StoreError, match="locked") as caught:
            bench.hit(counter())
        assert caught.value.outage
        with pytest.raises(StoreError, match="locked") as caught, transaction.atomic(using=COUNTERS):
            bench.hit(counter())
        assert not caught.value.outage, "a transaction's own fault"
    finally:
        over.set()
        thread.join()
    assert bench.hit(counter())[0].used == 1


# ── Failures ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_that_is_not_there(bench: Bench) -> None:
    with connection().cursor() as cursor:
        cursor.execute(f"DROP TABLE {TABLE}")
    for look in (bench.hit, bench.peek):
        with pytest.raises(StoreError, match=f"createcachetable --database {COUNTERS}") as caught:
            look(counter())
        assert caught.value.outage


@pytest.mark.parametrize("kind", ["database-postgresql", "database-mariadb"])
def test_a_connection_that_is_lost(kind: str, use_cache: Callable[..., Any]) -> None:
    bench = Bench(kind, use_cache(kind))
    bench.hit(counter())

    def kill_the_others(_: int) -> None:
        caches._end_other_sessions(connection())

    in_threads(1, kill_the_others)
    with pytest.raises(StoreError) as caught:
        bench.hit(counter(), counter(scope="other"))
    assert caught.value.outage
    connection().close_if_unusable_or_obsolete()  # as at the start of the next request
    assert bench.hit(counter())[0].used == 2


@pytest.mark.parametrize("kind", ["database-postgresql", "database-mariadb"])
def test_a_key_that_is_too_long(kind: str, use_cache: Callable[..., Any]) -> None:
    bench = Bench(kind, use_cache(kind))
    with pytest.raises(StoreError, match="DataError") as caught:
        bench.hit(counter("user:" + "x" * 300))
    assert not caught.value.outage
    with transaction.atomic(using=COUNTERS):
        with pytest.raises(StoreError):
            bench.hit(counter("user:" + "x" * 300))
        bench.hit(counter())
    assert bench.used(counter()) == [1]


def test_a_deadlock_is_begun_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deadlock(Exception):
        sqlstate = "40P01"

    states = database._Session.states
    raised = []

    def deadlock_once(session: Any, *args: Any) -> Any:
        if not raised:
            raised.append(True)
            raise database.OperationalError("deadlock detected") from Deadlock()
        return states(session, *args)

    monkeypatch.setattr(database._Session, "states", deadlock_once)
    assert bench.hit(counter())[0].used == 1
    raised.clear()
    with pytest.raises(StoreError, match="deadlock") as caught, transaction.atomic(using=COUNTERS):
        bench.hit(counter())
    assert not caught.value.outage


def test_nothing_stays_open_when_a_transaction_cannot_end(sqlite: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = [counter(), counter(scope="other")]
    sqlite.hit(*hits)

    def without_an_end(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql in ("COMMIT", "ROLLBACK"):
            raise DatabaseError(f"no {sql}")
        return execute(sql, params, many, context)

    with connection().execute_wrapper(without_an_end), pytest.raises(StoreError, match="no COMMIT"):
        sqlite.hit(*hits)
    assert connection().connection is None, "closed, and the transaction with it"
    assert sqlite.used(*hits) == [1, 1]


@pytest.mark.parametrize("text", ["", "!", "gASVAAAA", "Zm9v", "\N{SNOWMAN}"])
def test_a_row_that_no_cache_has_written(bench: Bench, text: str) -> None:
    hit = counter()
    bench.hit(hit)
    with connection().cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET value = %s", [text])
    assert bench.hit(hit)[0].reason is Reason.STORE_ERROR
    assert [entry.key for entry in bench.store.scan("rl:")] == [hit.key]


# ── Sweeping ───────────────────────────────────────────────────────────────────────────────────────────────


def test_expired_rows_are_swept_bit_by_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> int:
        with connection().cursor() as cursor:
            cursor.execute(f"SELECT COUNT(*) FROM {TABLE}")
            count: int = cursor.fetchone()[0]
        return count

    now = microseconds()
    hits = [counter(f"user:{number}", now=now - 7200 * SECOND) for number in range(250)]
    bench.hit(*hits, now=now - 7200 * SECOND)
    cache.set("theirs", 1, 300)
    cache.set("theirs_for_ever", 1, None)
    monkeypatch.setattr(database.random, "random", lambda: 0.0)
    with transaction.atomic(using=COUNTERS):
        bench.hit(counter("user:a", now=now), now=now)
    assert rows() == 253, "not inside a transaction of the caller"
    bench.hit(counter("user:a", now=now), now=now)
    assert rows() == 253, "not when there is no new row"
    left = []
    for number in range(4):
        bench.hit(counter(f"user:{number}", now=now), now=now)
        left.append(rows())
    assert left == [154, 55, 6, 7]
    monkeypatch.setattr(database.random, "random", lambda: 1.0)
    bench.hit(hits[0], counter("user:b", now=now), now=now - 7200 * SECOND)
    bench.hit(counter("user:c", now=now), now=now)
    assert rows() == 10, "seldom"
    assert cache.get("theirs") == cache.get("theirs_for_ever") == 1
    assert bench.used(counter("user:a", now=now), now=now) == [2]


def test_a_sweep_that_fails_fails_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.random, "random", lambda: 0.0)

    def without_sweeping(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "ORDER BY expires" in sql:
            raise DatabaseError("no")
        return execute(sql, params, many, context)

    with connection().execute_wrapper(without_sweeping):
        assert bench.hit(counter())[0].used == 1


# ── Listing ────────────────────────────────────────────────────────────────────────────────────────────────


def test_listing_100_000_rows_goes_by_the_index(use_cache: Callable[..., Any]) -> None:
    bench = Bench("database-postgresql", use_cache("database-postgresql"))
    with connection().cursor() as cursor:
        for prefix, number in (("rl:login", 20_000), ("session", 80_000)):
            cursor.execute(
                f"INSERT INTO {TABLE} SELECT ':1:{prefix}:' || n, 'gAVLBS4=', now() + interval '1 hour'"
                " FROM generate_series(1, %s) AS n",
                [number],
            )
        cursor.execute(f"ANALYZE {TABLE}")
        with CaptureQueriesContext(connection()) as queries:
            start = time.perf_counter()
            found = sum(load == 5 for _, load in bench.store.scan("rl:"))
            seconds = time.perf_counter() - start
        assert found == 20_000
        pages = [query["sql"] for query in queries.captured_queries]
        assert len(pages) == 21, "in pages of constant size"
        cursor.execute(f"EXPLAIN {pages[3]}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Index" in plan, plan
    assert "Seq Scan" not in plan, plan
    assert "Sort" not in plan, plan
    print(f"\n20,000 of 100,000 rows listed in {seconds:.2f} s\n{plan}")  # noqa: T201


def test_the_router_decides_where_counters_are(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def db_for_read(*args: Any, **kwargs: Any) -> str:
        asked.append(args)
        return COUNTERS

    monkeypatch.setattr(router, "db_for_read", db_for_read)
    bench.hit(counter()._replace(flags=FORCE))
    assert bench.used(counter()) == [1]
    assert not asked, "a replica may not know yet"


def test_a_database_file_that_cannot_be_written(sqlite: Bench, tmp_path: Path) -> None:
    sqlite.hit(counter(limit=2))
    with connection().cursor() as cursor:
        cursor.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="readonly") as caught:
        sqlite.hit(counter(limit=2))
    assert caught.value.outage
    assert sqlite.used(counter(limit=2)) == [1]
