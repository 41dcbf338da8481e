"""A hit over several slots of a Cluster: never more than the limit pass, and what is taken in vain is given back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimit_kv.algorithms import COUNT_DENIED, DENY_ON_ERROR, FORCE, Counter, Verdict, dump, load, transact
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.redis import RedisStore
from ratelimit_kv.stores.redis_cluster import hit_across, slot_of
from tests.servers import Cluster, start_redis_cluster
from tests.stores.bench import SECOND, Bench, counter, in_processes, in_threads, microseconds


@pytest.fixture(params=["django-redis-cluster", "django-valkey-cluster"])
def bench(request: pytest.FixtureRequest, use_cache: Callable[..., Any]) -> Bench:
    return Bench(request.param, use_cache(request.param))


IDENTITIES = [f"user:{number}" for number in range(3)]


def test_slots_are_those_of_the_server(redis_cluster: Cluster) -> None:
    keys = [
        "",
        "a",
        "{a}",
        "{a}b",
        "b{a}c",
        "{}a",
        "{a",
        "a}{b}",
        "{{a}}",
        "{a}{b}",
        ":1:rl:x:f60:{ip:::/64}:3",
        "\u00fc",
    ]
    with redis.Redis(port=redis_cluster.servers[0].port) as node:
        for key in keys:
            assert slot_of(key.encode()) == node.execute_command("CLUSTER KEYSLOT", key), key


def test_it_says_what_it_is(bench: Bench) -> None:
    assert (bench.store.is_exact, bench.store.round_trips) == (False, "1 for each identity")
    assert (RedisStore.is_exact, RedisStore.round_trips) == (True, "1")


def test_one_identity_is_one_slot_and_exact(bench: Bench) -> None:
    now = microseconds()
    hits = [counter("user:42", scope=scope, now=now, limit=40) for scope in ("a", "b", "c")]
    made = {slot_of(str(bench.cache.make_key(hit.key)).encode()) for hit in hits}
    assert len(made) == 1
    admitted = in_threads(
        6, lambda _: sum(all(v.allowed for v in bench.store.hit(hits, microseconds())) for _ in range(10))
    )
    assert sum(admitted) == 40
    assert bench.used(*hits, now=now) == [40] * 3


def test_what_a_later_slot_denies_is_given_back(bench: Bench) -> None:
    now = microseconds()
    for order in itertools.permutations(IDENTITIES):
        hits = [counter(who, scope="".join(order)[5::6], now=now, limit=2 if who == "user:1" else 9) for who in order]
        for number in range(4):
            verdicts = bench.hit(*hits, now=now)
            assert [verdict.charged for verdict in verdicts] == [number < 2] * 3
            assert [verdict.used for verdict in verdicts] == [min(number + 1, 2)] * 3
            assert [verdict.remaining for verdict in verdicts] == [hit.limit - min(number + 1, 2) for hit in hits]
        assert bench.used(*hits, now=now) == [2, 2, 2]


def test_never_more_than_the_limit_from_many_processes(bench: Bench) -> None:
    now = microseconds()
    everyone = counter("everyone", now=now, limit=50, scope="everyone")
    plans = [[counter(f"user:{number}", now=now, limit=1000, scope="own"), everyone] for number in range(4)]
    run = in_processes([plan[:: 1 if number % 2 else -1] for number, plan in enumerate(plans)], 60)
    assert 0 < run.admitted <= 50
    assert bench.used(everyone, now=now) == [run.admitted]
    assert sum(bench.used(*(plan[0] for plan in plans), now=now)) == run.admitted


def test_groups_and_flags_over_slots(bench: Bench) -> None:
    now = microseconds()
    first, second, third = (counter(who, now=now, limit=5) for who in IDENTITIES)
    bench.hit(second._replace(cost=5), now=now)
    stubborn = third._replace(flags=COUNT_DENIED, scope=7)
    verdicts = bench.hit(first, second, stubborn._replace(group=1), now=now)
    assert [verdict.charged for verdict in verdicts] == [False, False, True]
    denied = second._replace(flags=COUNT_DENIED, scope=8)
    verdicts = bench.hit(first, denied, third, now=now)
    assert [verdict.charged for verdict in verdicts] == [False, True, False]
    assert bench.used(first, second, third, now=now) == [0, 6, 1]
    verdicts = bench.hit(first._replace(flags=FORCE), second._replace(flags=FORCE), now=now)
    assert all(verdict.charged for verdict in verdicts)


@settings(max_examples=40)
@given(data=st.data())
def test_without_others_the_same_as_in_one_place(data: st.DataObject) -> None:
    """Any algorithm, alone in the world: the verdicts and the values are those of a single transaction."""
    values: dict[int, dict[str, Any]] = {}

    def hit_at(place: int, counters: Sequence[Counter], now: int) -> list[Verdict]:
        stored = values.setdefault(place, {})
        states = [load(each, stored.get(each.key), stored.get(each.previous)) for each in counters]
        verdicts, writes = transact(counters, states, now)
        stored.update({counters[n].key: dump(counters[n], state) for n, state in writes.items()})
        return verdicts

    reference: dict[str, Any] = {}
    now = 1_800_000_000 * SECOND
    for _ in range(data.draw(st.integers(1, 6))):
        now += data.draw(st.sampled_from([0, 1, SECOND]))
        hits = []
        for number in range(data.draw(st.integers(1, 5))):
            kind = data.draw(st.sampled_from("fsbc"))
            hit = counter(
                f"user:{number}",
                kind=kind,
                limit=data.draw(st.integers(0, 4)),
                cost=data.draw(st.integers(0, 3)),
                now=now,
                group=data.draw(st.integers(0, 1)),
                # A bucket bounds its debt, so that a forced charge may have taken less than is given back.
                flags=data.draw(
                    st.sampled_from([0, 0, 0, COUNT_DENIED] if kind == "b" else [0, 0, COUNT_DENIED, FORCE])
                ),
            )
            hits.append(hit._replace(scope=number))
        places = [data.draw(st.integers(0, 2)) for _ in hits]
        parts = [(place, [n for n, at in enumerate(places) if at == place]) for place in dict.fromkeys(places)]
        states = [load(each, reference.get(each.key), reference.get(each.previous)) for each in hits]
        expected, writes = transact(hits, states, now)
        # The same counter may lie elsewhere in the next step: what is compared is one step from the same values.
        values = {place: dict(reference) for place in range(3)}
        verdicts = hit_across(parts, hit_at, hits, now)
        assert [v.allowed for v in verdicts] == [v.allowed for v in expected]
        assert [v.charged for v in verdicts] == [v.charged for v in expected]
        assert [v.reason for v in verdicts] == [v.reason for v in expected]
        assert [v.used for v in verdicts] == [v.used for v in expected]
        reference.update({hits[n].key: dump(hits[n], state) for n, state in writes.items()})


# ── Servers ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_map_that_is_out_of_date(bench: Bench) -> None:
    """Slots that have moved: the command is passed on, and counts once."""
    now = microseconds()
    hits = [counter(f"user:{number}", now=now) for number in range(12)]
    bench.hit(*hits, now=now)
    cluster = bench.store._link  # type: ignore[attr-defined]
    shift = len(cluster._map) // 3
    cluster._map = cluster._map[shift:] + cluster._map[:shift]
    assert all(verdict.used == 2 for verdict in bench.hit(*hits, now=now))
    assert bench.used(*hits, now=now) == [2] * 12
    assert bench.store.reset([hit.key for hit in hits]) == 12


def test_a_slot_on_its_way_to_another_server(redis_cluster: Cluster, bench: Bench) -> None:
    hit = counter("user:moving", limit=99)
    bench.hit(hit)
    key = str(bench.cache.make_key(hit.key))
    slot = slot_of(key.encode())
    nodes = [redis.Redis(port=server.port, decode_responses=True) for server in redis_cluster.servers]
    ids = [node.execute_command("CLUSTER MYID") for node in nodes]
    source = next(n for n, node in enumerate(nodes) if node.execute_command("CLUSTER COUNTKEYSINSLOT", slot))
    target = (source + 1) % 3
    try:
        nodes[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        bench.hit(hit)  # still there
        nodes[source].execute_command(
            "MIGRATE", redis_cluster.servers[target].host, redis_cluster.servers[target].port, key, 0, 5000
        )
        bench.hit(hit)  # asked for at the other
        for number in (target, source):
            nodes[number].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])
        bench.hit(hit)  # moved
        assert bench.used(hit) == [4]
        assert bench.keys() == [hit.key]
    finally:
        for number in range(3):
            nodes[number].execute_command("CLUSTER SETSLOT", slot, "STABLE")
        nodes[target].execute_command("DEL", key)
        for number in (source, target):
            nodes[number].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[source])
        for node in nodes:
            node.close()


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    from tests.conftest import there

    cluster: Cluster = there(start_redis_cluster())
    yield cluster
    cluster.stop()


def test_one_server_that_hangs(
    own_cluster: Cluster, use_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters are store errors, each for itself; those of other servers count."""
    monkeypatch.setattr("ratelimit_kv.stores.redis_cluster.bounded", quickly)
    bench = Bench("django-redis-cluster", use_cache("django-redis-cluster", server=own_cluster))
    now = microseconds()
    hits = [counter(f"user:{number}", now=now, limit=99)._replace(scope=number) for number in range(9)]
    bench.hit(*hits, now=now)
    with own_cluster.servers[1].paused():
        verdicts = bench.hit(*hits, now=now)
        failed = [verdict.reason is Reason.STORE_ERROR for verdict in verdicts]
        assert 0 < sum(failed) < 9
        assert [verdict.charged for verdict in verdicts] == [not each for each in failed]
        assert all(verdict.cause for verdict, each in zip(verdicts, failed, strict=True) if each)
        lost = hits[failed.index(True)]
        with pytest.raises(StoreError) as caught:
            bench.hit(lost, now=now)
        assert caught.value.outage
        sound = hits[failed.index(False)]
        before = bench.used(sound, now=now)
        verdicts = bench.hit(sound, lost._replace(flags=DENY_ON_ERROR), now=now)
        assert not any(verdict.charged for verdict in verdicts)
        assert bench.used(sound, now=now) == before


def quickly(connection_settings: dict[str, Any]) -> dict[str, Any]:
    from ratelimit_kv.stores.redis_link import bounded

    return bounded({**connection_settings, "socket_timeout": 0.1, "socket_connect_timeout": 0.1})


def test_no_server_at_all(own_cluster: Cluster, use_cache: Callable[..., Any]) -> None:
    bench = Bench("django-redis-cluster", use_cache("django-redis-cluster", server=own_cluster))
    bench.hit(counter())
    own_cluster.stop()
    for action in (
        lambda: bench.hit(counter()),
        lambda: bench.peek(counter()),
        lambda: bench.store.reset(["rl:x"]),
        lambda: list(bench.store.scan("rl:")),
    ):
        with pytest.raises(StoreError) as caught:
            action()
        assert caught.value.outage


def test_a_cluster_that_is_down_from_the_start(use_cache: Callable[..., Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_valkey.cluster_cache.cache.ClusterValkeyCache.clear", lambda self: None)
        cache = use_cache("django-valkey-cluster", LOCATION="valkey://127.0.0.1:1/0")
        bench = Bench("django-valkey-cluster", cache)
    with pytest.raises(StoreError) as caught:
        bench.hit(counter())
    assert caught.value.outage
    assert (bench.store.is_exact, bench.store.round_trips) == (False, "1 for each identity")
    assert (RedisStore.is_exact, RedisStore.round_trips) == (True, "1")
