"""What every store must do, run by each against the real thing.

class TestDjangoRedis(StoreContract):
    kind = "django-redis"
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.core.cache import caches
from freezegun import freeze_time

from ratelimit_kv.algorithms import (
    BAN,
    BUCKET,
    CONCURRENT,
    COUNT_DENIED,
    DENY_ON_ERROR,
    EXISTING,
    FIXED,
    FORCE,
    MAX_COUNT,
    SLIDING,
    Counter,
    Unreadable,
    dump,
    load,
    observe,
    transact,
)
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import CannotList, get_store
from ratelimit_kv.stores.base import give_back
from ratelimit_kv.stores.cache import CacheStore
from tests.stores.bench import ALIAS, SECOND, Bench, counter, in_processes, in_threads, microseconds, refund

KEY_SETTINGS: dict[str, dict[str, Any]] = {
    "no prefix": {"KEY_PREFIX": ""},
    "colon": {"KEY_PREFIX": "app:prod"},
    "glob": {"KEY_PREFIX": "p*[a-z]?"},
    "wildcards of SQL": {"KEY_PREFIX": "50%_off\\"},
    "version": {"VERSION": 7},
    "key function": {"KEY_FUNCTION": "tests.stores.bench.piped_key", "KEY_PREFIX": "shop"},
}

# As they stand in keys: what callers send is encoded to letters, digits and -._~:@/,=+%.
IDENTITIES = (
    "user:42",
    "user:a:b",
    "user:%2A",
    "user:%5Bx%5D",
    "user:100%25",
    "user:a_b",
    "user:aXb",
    "user:A_B",
    "ip:2001:db8:1:2::/64",
    "field:~c2VjcmV0LXNlY3JldC0x+ip:203.0.113.9",
    "call:" + "x" * 91,
    "everyone",
)

STRANGE_VALUES: dict[str, Any] = {
    "text": "twelve",
    "mapping": {"count": 1},
    "list": [1, 2],
    "float": 1.5,
    "bool": True,
    "negative": -3,
    "too large": 2**60,
    "nothing": "",
}


class StoreContract:
    """Subclasses say the kind of cache, and what is not as it should be about it."""

    kind: ClassVar[str]
    """One of ``tests.caches.KINDS``."""
    settings: ClassVar[dict[str, Any]] = {}
    """Overrides for every test, as for ``tests.caches.cache_settings``."""
    store_class: ClassVar[str] = ""
    """Dotted name, where it is not the one that ``get_store`` takes for the cache."""
    identities: ClassVar[tuple[str, ...]] = IDENTITIES

    @pytest.fixture
    def open_bench(self, use_cache: Callable[..., Any]) -> Callable[..., Bench]:
        def open_bench(**overrides: Any) -> Bench:
            return Bench(self.kind, use_cache(self.kind, **{**self.settings, **overrides}), self.store_class)

        return open_bench

    @pytest.fixture
    def bench(self, open_bench: Callable[..., Bench]) -> Bench:
        return open_bench()

    @pytest.fixture(params=[FIXED, SLIDING, BUCKET, CONCURRENT, BAN])
    def algorithm(self, request: pytest.FixtureRequest, bench: Bench) -> str:
        kind: str = request.param
        if kind not in bench.store.kinds:
            pytest.skip(f"{bench.store.name} does not run algorithm {kind}")
        return kind

    # ── Counting ───────────────────────────────────────────────────────────────────────────────────────────

    def test_n_of_n_plus_1_pass(self, bench: Bench, algorithm: str) -> None:
        if algorithm == BAN:
            pytest.skip("a ban counts nothing")
        now = microseconds()
        hits = [counter(kind=algorithm, now=now, limit=5) for _ in range(6)]
        verdicts = [bench.hit(hit, now=now)[0] for hit in hits]
        assert [verdict.allowed for verdict in verdicts] == [True] * 5 + [False]
        assert [verdict.charged for verdict in verdicts] == [True] * 5 + [False]
        assert [verdict.used for verdict in verdicts] == [1, 2, 3, 4, 5, 5]
        assert [verdict.remaining for verdict in verdicts] == [4, 3, 2, 1, 0, 0]
        assert verdicts[-1].reason is Reason.OVER_LIMIT
        assert verdicts[-1].retry_after

    def test_cost(self, bench: Bench, algorithm: str) -> None:
        if algorithm == BAN:
            pytest.skip("a ban counts nothing")
        now = microseconds()
        costs = [0, 4, 7, 3, 2, 1]
        verdicts = [bench.hit(counter(kind=algorithm, now=now, limit=6, cost=cost), now=now)[0] for cost in costs]
        assert [verdict.allowed for verdict in verdicts] == [True, True, False, False, True, False]
        assert verdicts[2].reason is Reason.IMPOSSIBLE
        assert verdicts[2].retry_after is None
        assert [verdict.used for verdict in verdicts] == [0, 4, 4, 4, 6, 6]

    def test_nothing_counts_against_a_limit_of_0(self, bench: Bench) -> None:
        (verdict,) = bench.hit(counter(limit=0))
        assert not verdict.allowed
        assert bench.seconds_left(counter().key) is None

    def test_denied_hits_do_not_count(self, bench: Bench, algorithm: str) -> None:
        if algorithm == BAN:
            pytest.skip("a ban counts nothing")
        now = microseconds()
        hit = counter(kind=algorithm, now=now, limit=2)
        assert bench.admitted([hit] * 10, now=now) == 2
        assert bench.used(hit, now=now) == [2]

    def test_each_identity_has_its_own(self, bench: Bench) -> None:
        now = microseconds()
        for identity in self.identities:
            hit = counter(identity, now=now, limit=2)
            assert bench.admitted([hit] * 3, now=now) == 2, identity
            assert bench.cache.get(hit.key) == 2

    def test_a_new_window_starts_from_nothing(self, bench: Bench) -> None:
        now = microseconds()
        assert bench.admitted([counter(now=now)] * 4, now=now) == 3
        later = counter(now=now).end
        assert bench.admitted([counter(now=later)] * 4, now=later) == 3

    def test_the_window_before_weighs_on_a_sliding_one(self, bench: Bench) -> None:
        if SLIDING not in bench.store.kinds:
            pytest.skip("no sliding windows")
        now = microseconds()
        first = counter(kind=SLIDING, now=now, limit=4)
        assert bench.admitted([first] * 5, now=now) == 4
        middle = first.end + first.period // 2
        assert bench.admitted([counter(kind=SLIDING, now=middle, limit=4)] * 5, now=middle) == 2
        assert bench.used(counter(kind=SLIDING, now=middle, limit=4), now=middle) == [4]

    def test_a_bucket_refills(self, bench: Bench) -> None:
        if BUCKET not in bench.store.kinds:
            pytest.skip("no buckets")
        now = microseconds()

        def hit(at: int) -> Counter:
            return counter(kind=BUCKET, now=at, limit=4, period=40)

        assert bench.admitted([hit(now)] * 5, now=now) == 4
        later = now + 20 * SECOND
        assert bench.admitted([hit(later)] * 5, now=later) == 2

    def test_what_lands_makes_room(self, bench: Bench) -> None:
        if CONCURRENT not in bench.store.kinds:
            pytest.skip("no concurrency limits")
        now = microseconds()
        first = counter(kind=CONCURRENT, now=now, limit=2)
        second = counter(kind=CONCURRENT, now=now + 5, limit=2)
        third = counter(kind=CONCURRENT, now=now + 9, limit=2)
        assert bench.hit(first, now=now)[0].allowed
        assert bench.hit(second, now=now + 5)[0].allowed
        assert not bench.hit(third, now=now + 9)[0].allowed
        assert bench.hit(refund(first), now=now + 9)[0].charged
        assert bench.hit(third, now=now + 9)[0].allowed
        assert bench.hit(refund(first), now=now + 9)[0].used == 2, "what has landed cannot land again"

    def test_a_ban_falls_and_ends(self, bench: Bench) -> None:
        if BAN not in bench.store.kinds:
            pytest.skip("no bans")
        now = microseconds()
        ban = counter(kind=BAN, now=now, limit=2, period=600)
        for window in range(2):
            at = now + window * 60 * SECOND
            hit = counter(now=at, limit=1, period=60)
            assert bench.hit(hit, ban, now=at)[0].allowed
            denied, banned = bench.hit(hit, ban, now=at)
            assert not denied.allowed
            assert banned.allowed == (window == 0)
        at += 300 * SECOND
        hit, banned = bench.hit(counter(now=at, limit=1, period=60), ban, now=at)
        assert (hit.charged, banned.reason, banned.retry_after) == (False, Reason.BANNED, 300 * SECOND)
        at += 300 * SECOND
        hit, banned = bench.hit(counter(now=at, limit=1, period=60), ban, now=at)
        assert (hit.charged, banned.allowed) == (True, True)

    # ── All or nothing ─────────────────────────────────────────────────────────────────────────────────────

    def test_all_or_nothing_whatever_the_order(self, bench: Bench) -> None:
        now = microseconds()
        for number, order in enumerate(itertools.permutations(range(3))):
            who = f"user:{number}"
            narrow = counter(who, now=now, limit=2, scope="narrow")
            wide = counter(who, now=now, limit=10, scope="wide")
            everyone = counter(who, now=now, limit=10, scope="everyone")
            hits = [(narrow, wide, everyone)[position] for position in order]
            outcomes = [[verdict.charged for verdict in bench.hit(*hits, now=now)] for _ in range(4)]
            assert outcomes == [[True] * 3] * 2 + [[False] * 3] * 2
            assert bench.used(narrow, wide, everyone, now=now) == [2, 2, 2]

    def test_all_or_nothing_over_every_algorithm(self, bench: Bench) -> None:
        kinds = sorted(bench.store.kinds - {BAN})
        now = microseconds()
        hits = [counter(kind=kind, now=now, limit=9, scope=f"scope{kind}") for kind in kinds]
        last = counter(now=now, limit=2, scope="last")
        for _ in range(4):
            bench.hit(*hits, last, now=now)
        assert bench.used(*hits, last, now=now) == [2] * len(hits) + [2]

    def test_groups_are_charged_apart(self, bench: Bench) -> None:
        now = microseconds()
        full = counter("user:1", now=now, limit=1)
        beside = counter("user:2", now=now)
        shadow = counter("user:3", now=now, group=1)
        bench.hit(full, now=now)
        verdicts = bench.hit(full, beside, shadow, now=now)
        assert [verdict.charged for verdict in verdicts] == [False, False, True]
        assert [verdict.allowed for verdict in verdicts] == [False, True, True]

    def test_a_scope_may_count_its_own_denials(self, bench: Bench) -> None:
        now = microseconds()
        hit = counter(now=now, limit=1, flags=COUNT_DENIED)
        other = counter("user:2", now=now, scope="other")._replace(scope=1, flags=COUNT_DENIED)
        for _ in range(3):
            bench.hit(hit, other, now=now)
        assert bench.used(hit, other, now=now) == [3, 1]

    # ── Expiry ─────────────────────────────────────────────────────────────────────────────────────────────

    def test_the_expiry_is_set_once_and_not_moved(self, bench: Bench) -> None:
        hit = counter(limit=9, ttl=100)
        bench.hit(hit)
        assert 98 <= bench.seconds_left(hit.key) <= 102
        for flags, cost in ((0, 1), (FORCE, 2), (FORCE | EXISTING, -1)):
            bench.hit(hit._replace(ttl=900, flags=flags, cost=cost))
        bench.hit(hit._replace(ttl=900, limit=1))
        assert 90 <= bench.seconds_left(hit.key) <= 102
        assert bench.used(hit) == [3]

    def test_what_has_no_window_lives_on_with_each_hit(self, bench: Bench, algorithm: str) -> None:
        if algorithm not in (BUCKET, CONCURRENT):
            pytest.skip("has a window")
        hit = counter(kind=algorithm, limit=9, ttl=100)
        bench.hit(hit)
        bench.hit(hit._replace(ttl=900))
        assert 890 <= bench.seconds_left(hit.key) <= 902

    def test_a_lifetime_of_years(self, bench: Bench) -> None:
        years = 5 * 366 * 86400
        hit = counter(limit=2, ttl=years)
        assert bench.admitted([hit] * 3) == 2
        assert abs(bench.seconds_left(hit.key) - years) < 10

    def test_the_last_moment_of_a_window(self, bench: Bench, algorithm: str) -> None:
        if algorithm == BAN:
            pytest.skip("a ban counts nothing")
        now = counter(now=microseconds(), period=60).end - 1
        hit = counter(kind=algorithm, now=now, period=60, limit=1, ttl=1)
        assert bench.hit(hit, now=now)[0].allowed
        assert not bench.hit(hit, now=now)[0].allowed

    def test_a_key_that_expired_is_not_there(self, bench: Bench) -> None:
        # By the store's own clock or by the time it is given: both have passed.
        start = datetime.now(UTC)
        with freeze_time(start) as clock:
            hit = counter(ttl=1, limit=1)
            bench.hit(hit)
            clock.tick(3)
            bench.wait_for_expiry(hit.key)
            assert bench.used(hit) == [0]
            assert not bench.hit(refund(hit))[0].charged
            assert bench.hit(hit)[0].allowed
            assert not bench.hit(hit)[0].allowed
            assert bench.cache.get(hit.key) == 1

    def test_a_frozen_clock(self, bench: Bench) -> None:
        with freeze_time(datetime(2024, 2, 29, 23, 59, 59, 600_000, UTC)) as clock:
            for _ in range(2):
                assert bench.admitted(counter(limit=2, period=60) for _ in range(3)) == 2
                assert bench.cache.get(counter(period=60).key) == 2
                clock.tick(timedelta(seconds=0.4))
            clock.move_to(datetime(2024, 3, 1, 0, 59, 59, 999_999, UTC))
            assert bench.admitted(counter(limit=2, period=60) for _ in range(3)) == 2

    # ── Giving back ────────────────────────────────────────────────────────────────────────────────────────

    def test_a_refund_goes_to_its_own_window_and_not_below_zero(self, bench: Bench) -> None:
        now = microseconds()
        old = counter(now=now)
        later = old.end
        new = counter(now=later)
        bench.hit(old, now=now)
        bench.hit(old, now=now)
        bench.hit(new, now=later)
        assert bench.hit(refund(old), now=later)[0].charged
        assert bench.used(old, now=now) == [1]
        bench.hit(refund(old, 5), now=later)
        assert bench.used(old, now=now) == [0]
        assert bench.used(new, now=later) == [1]
        assert bench.admitted([old] * 4, now=now) == 3, "a window that was given back is all there"

    def test_a_refund_writes_no_key(self, bench: Bench, algorithm: str) -> None:
        hit = counter(kind=algorithm)
        assert not bench.hit(refund(hit))[0].charged
        assert bench.seconds_left(hit.key) is None

    def test_what_was_charged_is_given_back(self, bench: Bench) -> None:
        now = microseconds()
        kinds = sorted(bench.store.kinds - {BAN})
        hits = [counter(kind=kind, now=now, cost=2, limit=5, scope=f"scope{kind}") for kind in kinds]
        verdicts = bench.hit(*hits, now=now)
        assert bench.used(*hits, now=now) == [2] * len(kinds)
        returned = bench.hit(*give_back(hits, verdicts), now=now)
        assert all(verdict.charged for verdict in returned)
        assert bench.used(*hits, now=now) == [0] * len(kinds)

    def test_a_charge_may_pass_the_limit(self, bench: Bench) -> None:
        hit = counter(limit=3)
        (verdict,) = bench.hit(hit._replace(cost=200, flags=FORCE))
        assert (verdict.charged, verdict.used, verdict.remaining) == (True, 200, 0)
        (verdict,) = bench.hit(hit._replace(cost=-199, flags=FORCE | EXISTING))
        assert verdict.used == 1
        assert bench.admitted([hit] * 3) == 2

    def test_numbers_as_large_as_they_come(self, bench: Bench) -> None:
        hit = counter(limit=MAX_COUNT, cost=MAX_COUNT - 1)
        assert bench.hit(hit)[0].used == MAX_COUNT - 1
        assert bench.hit(hit._replace(cost=1))[0].remaining == 0
        assert not bench.hit(hit._replace(cost=1))[0].allowed
        assert bench.hit(hit._replace(flags=FORCE))[0].used == MAX_COUNT, "it stays what can be read again"
        assert bench.hit(hit._replace(cost=3 - MAX_COUNT, flags=FORCE | EXISTING))[0].used == 3
        assert bench.cache.get(hit.key) == 3
        assert bench.hit(hit._replace(cost=9))[0].used == 12

    # ── Looking ────────────────────────────────────────────────────────────────────────────────────────────

    def test_peek_writes_nothing(self, bench: Bench, algorithm: str) -> None:
        now = microseconds()
        hit = counter(kind=algorithm, now=now, limit=2, ttl=100)
        (verdict,) = bench.peek(hit, now=now)
        assert (verdict.allowed, verdict.charged, verdict.used) == (True, False, 0)
        assert bench.seconds_left(hit.key) is None
        bench.hit(hit, now=now)
        before = bench.cache.get(hit.key)
        for _ in range(3):
            (verdict,) = bench.peek(hit._replace(ttl=900), now=now)
            assert verdict.allowed
        assert bench.cache.get(hit.key) == before
        if algorithm != BAN:
            assert verdict.used == 1
            assert 90 <= bench.seconds_left(hit.key) <= 102

    def test_the_cache_agrees(self, bench: Bench) -> None:
        now = microseconds()
        for kind in bench.store.kinds & {FIXED, SLIDING}:
            hit = counter(kind=kind, now=now, scope=f"scope{kind}")
            for count in (1, 2, 3):
                bench.hit(hit, now=now)
                found = bench.cache.get(hit.key)
                assert (type(found), found) == (int, count)

    def test_no_counts_are_lost_between_this_store_and_the_generic_one(self, bench: Bench) -> None:
        hit = counter(limit=100)
        generic = CacheStore(ALIAS)
        for count in range(1, 13):
            store = (bench.store, generic)[count % 2]
            assert store.hit([hit], microseconds())[0].used == count
            assert bench.store.peek([hit], microseconds())[0].used == count
            assert generic.peek([hit], microseconds())[0].used == count
        generic.hit([refund(hit, 5)], microseconds())
        assert bench.used(hit) == [7], "a count that became shorter"
        bench.hit(refund(hit, 5))
        assert generic.peek([hit], microseconds())[0].used == 2
        assert bench.cache.get(hit.key) == 2

    @pytest.mark.parametrize("what", STRANGE_VALUES)
    def test_a_value_of_somebody_else(self, bench: Bench, what: str) -> None:
        value = STRANGE_VALUES[what]
        now = microseconds()
        strange = counter("user:1", now=now)
        sound = counter("user:2", now=now)
        bench.cache.set(strange.key, value, 300)
        if type(bench.cache.get(strange.key)) is not type(value):
            pytest.skip("the client has made something else of it")
        for look in (bench.hit, bench.peek):
            wrong, right = look(strange, sound, now=now)
            assert (wrong.reason, wrong.allowed, wrong.charged) == (Reason.STORE_ERROR, False, False)
            assert wrong.cause
            assert str(value) not in wrong.cause or not value
            assert right.allowed
            assert right.charged == (look == bench.hit)
        careful = strange._replace(flags=DENY_ON_ERROR)
        assert [verdict.charged for verdict in bench.hit(careful, sound, now=now)] == [False, False]
        assert bench.used(sound, now=now) == [1]
        bench.hit(strange._replace(flags=FORCE), refund(strange), now=now)
        assert bench.cache.get(strange.key) == value
        assert bench.store.reset([strange.key]) == 1

    def test_a_value_of_somebody_else_under_every_algorithm(self, bench: Bench, algorithm: str) -> None:
        hit = counter(kind=algorithm)
        bench.cache.set(hit.key, "who,was,this", 300)
        assert bench.hit(hit)[0].reason is Reason.STORE_ERROR
        if algorithm == SLIDING:
            bench.cache.delete(hit.key)
            bench.cache.set(hit.previous, "who,was,this", 300)
            assert bench.hit(hit)[0].reason is Reason.STORE_ERROR
            assert bench.seconds_left(hit.key) is None

    # ── Finding and removing ───────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("which", KEY_SETTINGS)
    def test_keys_are_found_and_removed(self, open_bench: Callable[..., Bench], which: str) -> None:
        bench = open_bench(**KEY_SETTINGS[which])
        now = microseconds()
        hits = [counter(identity, now=now, scope=scope) for identity in self.identities for scope in ("a", "b")]
        for hit in hits:
            bench.hit(hit, now=now)
            assert bench.cache.get(hit.key) == 1
        foreign = {"other": 5, "rl": 5, "rl_:x": 5, "rlx:x": 5, "RL:x": 5, "r": 5, "a:rl:x": 5, "rl;": 5}
        for key, value in foreign.items():
            bench.cache.set(key, value, 300)
            bench.cache.set(f"rl:{key}", value, 300, version=99)

        def all_foreign() -> bool:
            return all(
                bench.cache.get(key) == value and bench.cache.get(f"rl:{key}", version=99) == value
                for key, value in foreign.items()
            )

        if bench.store.can_list:
            assert bench.keys() == sorted(hit.key for hit in hits)
            assert bench.keys("rl:a:") == sorted(hit.key for hit in hits if hit.key.startswith("rl:a:"))
            assert {load(hits[0], entry.value) for entry in bench.store.scan("rl:")} == {1}
            assert bench.keys("rl:a:f3600:{user:a_") == [key for key in bench.keys("rl:a:") if ":{user:a_b}:" in key]
            assert bench.keys("rl:a:f3600:{user:100%") == [
                key for key in bench.keys("rl:a:") if ":{user:100%25}:" in key
            ]
            assert bench.keys("rl:nobody") == []
        assert bench.store.reset([hits[0].key, hits[2].key, "rl:a:nobody"]) == 2
        assert bench.used(*hits[:4], now=now) == [0, 1, 0, 1]
        assert bench.store.reset([hits[0].key]) == 0
        assert bench.store.reset([]) == 0
        assert bench.store.reset([hit.key for hit in hits]) == len(hits) - 2
        assert sum(bench.used(*hits, now=now)) == 0
        assert all_foreign()

    def test_keys_that_cannot_be_found_by_how_they_begin(self, open_bench: Callable[..., Bench]) -> None:
        bench = open_bench(KEY_FUNCTION="tests.stores.bench.reversed_key")
        hit = counter()
        bench.hit(hit)
        assert bench.used(hit) == [1]
        with pytest.raises(CannotList, match="KEY_FUNCTION" if bench.store.can_list else "no way"):
            list(bench.store.scan("rl:"))
        assert bench.store.reset([hit.key]) == 1

    def test_more_keys_than_one_batch(self, bench: Bench) -> None:
        if not bench.store.can_list:
            pytest.skip("cannot list")
        now = microseconds()
        hits = [counter(f"user:{number}", now=now) for number in range(2500)]
        for start in range(0, 2500, 100):
            bench.hit(*(hit._replace(cost=1 + start, flags=FORCE) for hit in hits[start : start + 100]), now=now)
        found = {entry.key: load(hits[0], entry.value) for entry in bench.store.scan("rl:")}
        assert found == {hit.key: 1 + number // 100 * 100 for number, hit in enumerate(hits)}
        assert bench.store.reset([*found, "rl:x"]) == 2500
        assert bench.keys() == []

    # ── As the reference says ──────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("seed", range(4))
    def test_same_answers_as_a_dictionary(self, bench: Bench, seed: int) -> None:
        dice = random.Random(seed)
        kinds = sorted(bench.store.kinds)
        now = microseconds()
        values: dict[str, Any] = {}
        taken: list[Counter] = []

        def states(counters: list[Counter]) -> list[Any]:
            return [load(each, values.get(each.key), values.get(each.previous)) for each in counters]

        for _ in range(120):
            # Within the shortest lifetime of a key, or what expires by the real clock would differ.
            now += dice.choice([0, 1, 1000, SECOND // 3, SECOND])
            hits = [
                counter(
                    f"user:{dice.randrange(2)}",
                    kind=kind,
                    scope=f"s{kind}",
                    now=now,
                    limit=dice.choice([0, 1, 3, 7]) if kind != BAN else 2,
                    cost=dice.choice([0, 1, 1, 1, 2, 5]),
                    period=dice.choice([3, 7]),
                    group=dice.randrange(2),
                    flags=dice.choice([0, 0, 0, 0, COUNT_DENIED, FORCE]) if kind != BAN else 0,
                )._replace(scope=number % 3)
                for number, kind in enumerate(dice.sample(kinds, dice.randint(1, len(kinds))))
            ]
            if taken and dice.random() < 0.3:
                hits = [refund(dice.choice(taken), dice.choice([1, 2]))]
            before = states(hits)
            if dice.random() < 0.2:
                assert bench.peek(*hits, now=now) == observe(hits, before, now)
                continue
            verdicts, writes = transact(hits, before, now)
            assert not any(type(state) is Unreadable for state in before)
            assert bench.hit(*hits, now=now) == verdicts
            values.update({hits[position].key: dump(hits[position], state) for position, state in writes.items()})
            taken += [
                hit
                for hit, verdict in zip(hits, verdicts, strict=True)
                if verdict.charged and hit.cost > 0 and hit.kind != BAN
            ]
        if bench.store.can_list:
            # Not by cache.get: the cache's serializer need not know the texts of bans and of what is in flight.
            stored = {entry.key: entry.value for entry in bench.store.scan("rl:")}
        else:
            stored = {key: bench.cache.get(key) for key in values}
        for key, value in values.items():
            like = counter(kind=key.split(":")[2][0])
            assert load(like, stored[key]) == load(like, value)

    # ── Many at once ───────────────────────────────────────────────────────────────────────────────────────

    def test_in_an_event_loop(self, bench: Bench) -> None:
        now = microseconds()
        hit = counter(now=now, limit=2)
        ahit, apeek, areset = (
            async_to_sync(method) for method in (bench.store.ahit, bench.store.apeek, bench.store.areset)
        )
        assert [ahit([hit], now)[0].allowed for _ in range(3)] == [True, True, False]
        assert apeek([hit], now)[0].used == 2
        assert areset([hit.key]) == 1
        assert apeek([hit], now)[0].used == 0

    def test_threads(self, bench: Bench) -> None:
        now = microseconds()

        def plan(thread: int) -> list[Counter]:
            own = counter(f"user:{thread}", now=now, limit=1000, scope="own")
            everyone = counter("everyone", now=now, limit=40, scope="everyone")
            return [own, everyone][:: 1 if thread % 2 else -1]

        def work(thread: int) -> int:
            hits = plan(thread)
            return sum(all(verdict.allowed for verdict in bench.store.hit(hits, microseconds())) for _ in range(15))

        admitted = sum(in_threads(6, work))
        hits = [hit for thread in range(6) for hit in plan(thread)]
        own = sum(bench.used(hit)[0] for hit in hits if hit.limit == 1000)
        everyone = next(hit for hit in hits if hit.limit == 40)
        assert admitted <= 40
        if bench.store.is_exact:
            assert admitted == 40
        assert own == admitted, "what was denied was given back"
        assert bench.used(everyone) == [admitted]

    def test_processes_on_one_counter(self, bench: Bench) -> None:
        if not bench.store.is_shared:
            pytest.skip("each process has its own")
        hit = counter(limit=100)
        run = in_processes([[hit]] * 8, 200, self.store_class)
        print(f"\n{self.kind}, one counter: {run}")  # noqa: T201
        assert run.admitted <= 100
        if bench.store.is_exact:
            assert run.admitted == 100
        assert bench.cache.get(hit.key) == run.admitted, "denials in between have not raised it"

    def test_processes_on_three_counters(self, bench: Bench) -> None:
        if not bench.store.is_shared:
            pytest.skip("each process has its own")
        now = microseconds()
        wide = counter("ip:203.0.113.9", now=now, limit=110, scope="wide")
        everyone = counter("everyone", now=now, limit=100, scope="everyone")
        own = [counter(f"user:{number}", now=now, limit=1000, scope="own") for number in range(8)]
        run = in_processes([[mine, wide, everyone] for mine in own], 200, self.store_class)
        print(f"\n{self.kind}, three counters: {run}")  # noqa: T201
        assert run.admitted <= 100
        if bench.store.is_exact:
            assert run.admitted == 100
        assert bench.cache.get(wide.key) == bench.cache.get(everyone.key) == run.admitted
        assert sum(bench.cache.get(mine.key) or 0 for mine in own) == run.admitted

    # ── Itself ─────────────────────────────────────────────────────────────────────────────────────────────

    def test_it_is_one_object_that_can_be_shown(self, bench: Bench) -> None:
        store = get_store(ALIAS)
        assert store is get_store(ALIAS)
        assert store.alias == ALIAS
        assert store.name
        assert store.round_trips
        assert caches[ALIAS] is bench.cache
