"""The client's address: which header is believed, from whom, and what a header may hold."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimit_kv import client_ip
from ratelimit_kv.client_ip import UNKNOWN, ClientIP, ProxyError, cut, problems, warnings

unhurried = settings(deadline=None)


@pytest.fixture(autouse=True)
def warned_of_nothing_yet() -> Iterator[None]:
    client_ip._warned.clear()
    yield
    client_ip._warned.clear()


def request(peer: Any = "10.0.0.2", chain: Any = None, **more: Any) -> dict[str, Any]:
    meta = {"REMOTE_ADDR": peer, "PATH_INFO": "/", **more}
    if chain is not None:
        meta["HTTP_X_FORWARDED_FOR"] = chain
    return meta


# ------------------------------------------------------------------------------------------------ one address

SPELLINGS = [
    ("203.0.113.9", "203.0.113.9"),
    ("  203.0.113.9\t", "203.0.113.9"),
    ("203.0.113.9:41822", "203.0.113.9"),
    ("2001:db8::5", "2001:db8::5"),
    ("2001:DB8:0:0::0005", "2001:db8::5"),
    ("[2001:db8::5]", "2001:db8::5"),
    ("[2001:db8::5]:443", "2001:db8::5"),
    ("fe80::1%eth0", "fe80::1"),
    ("[fe80::1%25eth0]:443", "fe80::1"),
    ("::ffff:1.2.3.4", "1.2.3.4"),
    ("::ffff:102:304", "1.2.3.4"),
    ("[::ffff:1.2.3.4]:80", "1.2.3.4"),
    ("64:ff9b::1.2.3.4", "1.2.3.4"),
    ("64:ff9b::102:304", "1.2.3.4"),
    ("64:ff9b:1::102:304", "64:ff9b:1::102:304"),
    ("::1", "::1"),
    # Without brackets the last group of an IPv6 address is part of it.
    ("2001:db8::5:443", "2001:db8::5:443"),
]

NO_ADDRESSES = [
    "",
    " ",
    ",",
    "unknown",
    "_hidden",
    "localhost",
    "203.0.113",
    "203.0.113.9.1",
    "203.0.113.256",
    "203.0.113.9:",
    "203.0.113.9:http",
    "203.0.113.9:123456",
    "203.0.113.9%eth0",
    "203.0.113.9/32",
    "203.0.113.9, 198.51.100.1",
    "0x7f.1",
    "127.1",
    "2130706433",
    "010.0.0.1",
    "::ffff:010.0.0.1",
    "\u0661.2.3.4",
    "\uff11.2.3.4",
    "1.2.3.4\x00",
    "[2001:db8::5",
    "[2001:db8::5]443",
    "[]:80",
    ":80",
    "2001:db8::g",
    "2001:db8:::5",
    "fe80::1%" + "e" * 200,
    "1" * 1_000_000,
]


@pytest.mark.parametrize(("text", "address"), SPELLINGS)
def test_spellings_of_an_address(text: str, address: str) -> None:
    assert ClientIP().address(request(text)) == address
    assert ClientIP.build(["10.0.0.0/8"]).address(request(chain=text)) == address
    assert ClientIP.build(1).address(request(chain=text)) == address
    assert ClientIP.build(1, "X-Real-IP").address(request(HTTP_X_REAL_IP=text)) == address
    assert cut(text, 32, 128) == address


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address(text: str) -> None:
    assert ClientIP().address(request(text)) is None
    assert ClientIP().identity(request(text)) == UNKNOWN
    if "," not in text:
        assert ClientIP.build(["10.0.0.0/8"]).address(request(chain=text)) == "10.0.0.2"
        assert ClientIP.build(1).address(request(chain=text)) == "10.0.0.2"
    assert ClientIP.build(1, "X-Real-IP").address(request(HTTP_X_REAL_IP=text)) == "10.0.0.2"
    if "/" not in text:
        assert cut(text, 32, 128) is None


@pytest.mark.parametrize("peer", [None, b"203.0.113.9", 7, ["203.0.113.9"], object(), 1.5, True, {}])
@pytest.mark.parametrize("trusted", [(), ["10.0.0.0/8"], "unix", 2])
def test_a_peer_that_is_no_text_raises_nothing(peer: Any, trusted: Any) -> None:
    client = ClientIP.build(trusted, exempt=["0.0.0.0/0", "::/0"])
    assert client.identity(request(peer)) == UNKNOWN
    assert client.identity({}) == UNKNOWN
    assert client.address(request(peer)) is None
    assert client.is_exempt(request(peer)) is False


# --------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("text", "ipv4_prefix", "ipv6_prefix", "identity"),
    [
        ("203.0.113.9", 32, 64, "203.0.113.9"),
        ("203.0.113.9:41822", 24, 64, "203.0.113.0/24"),
        ("203.0.113.9", 16, 64, "203.0.0.0/16"),
        ("2001:db8:1:2:3::4", 32, 64, "2001:db8:1:2::/64"),
        ("[2001:db8:1:2:3::4]:443", 32, 56, "2001:db8:1::/56"),
        ("2001:db8:1:2::3", 32, 48, "2001:db8:1::/48"),
        ("2001:db8:1:2::3", 32, 128, "2001:db8:1:2::3"),
        ("::ffff:203.0.113.9", 24, 64, "203.0.113.0/24"),
        # Identities, and networks that are narrower, as a person copies them from a list.
        ("2001:db8:1:2::/64", 32, 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2::/64", 32, 48, "2001:db8:1::/48"),
        ("203.0.113.0/24", 24, 64, "203.0.113.0/24"),
        ("203.0.113.9/32", 32, 64, "203.0.113.9"),
        # Wider than an identity: none is meant.
        ("2001:db8:1::/48", 32, 64, None),
        ("203.0.113.0/24", 32, 64, None),
        ("203.0.113.9/33", 32, 64, None),
        ("203.0.113.9/", 32, 64, None),
        ("203.0.113.9/x", 32, 64, None),
        ("203.0.113.9/24/24", 24, 64, None),
        ("x/64", 32, 64, None),
        ("unknown", 32, 64, None),
        # Prefixes that do not exist.
        ("203.0.113.9", 33, 64, None),
        ("2001:db8::1", 32, 129, None),
        ("2001:db8::1", 32, -1, None),
    ],
)
def test_cut(text: str, ipv4_prefix: int, ipv6_prefix: int, identity: str | None) -> None:
    assert cut(text, ipv4_prefix, ipv6_prefix) == identity
    if identity is not None:
        assert cut(identity, ipv4_prefix, ipv6_prefix) == identity


def test_a_network_of_a_customer_is_one_identity() -> None:
    client = ClientIP()
    first = client.identity(request("2001:db8:1:2::1"))
    assert first == client.identity(request("2001:db8:1:2::2")) == "2001:db8:1:2::/64"
    assert client.identity(request("2001:db8:1:3::1")) != first
    assert client.identity(request("2001:db8:1:3::1"), 48) == client.identity(request("2001:db8:1:2::1"), 48)
    assert client.identity(request("203.0.113.9"), 48) == "203.0.113.9"


def test_a_zone_does_not_make_an_identity() -> None:
    client = ClientIP()
    assert client.identity(request("fe80::1%eth0")) == client.identity(request("fe80::1%eth1"))
    assert client.identity(request("fe80::1%eth0")) != client.identity(request("2001:db8::7"))


@given(st.ip_addresses(), st.integers(16, 32), st.integers(48, 128))
def test_an_identity_is_the_network_of_the_address(address: Any, ipv4_prefix: int, ipv6_prefix: int) -> None:
    identity = cut(str(address), ipv4_prefix, ipv6_prefix)
    assert identity is not None
    assert cut(identity, ipv4_prefix, ipv6_prefix) == identity
    unwrapped = ipaddress.ip_address(ClientIP().address(request(str(address))) or "")
    assert unwrapped in ipaddress.ip_network(identity)


# ----------------------------------------------------------------------------------------------------- chains

PROXIES = ["10.0.0.0/8", "2001:db8:ffff::/48"]


@pytest.mark.parametrize(
    ("chain", "address"),
    [
        (None, "10.0.0.2"),
        ("203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:41822", "203.0.113.9"),
        # What the client wrote is further left.
        ("1.1.1.1, 203.0.113.9", "203.0.113.9"),
        ("junk, 203.0.113.9", "203.0.113.9"),
        ("127.0.0.1,203.0.113.9", "203.0.113.9"),
        ("10.9.9.9, 203.0.113.9", "203.0.113.9"),
        # Trusted hops are skipped, in any spelling.
        ("203.0.113.9, 10.1.1.1", "203.0.113.9"),
        ("1.1.1.1, 203.0.113.9, 10.1.1.1, 10.1.1.2", "203.0.113.9"),
        ("203.0.113.9, [2001:db8:ffff::1]:443, ::ffff:10.1.1.1, 10.1.1.2:80", "203.0.113.9"),
        ("2001:db8::5, 10.1.1.1", "2001:db8::5"),
        # Two lines of the header arrive joined.
        ("1.1.1.1,203.0.113.9, 10.1.1.1", "203.0.113.9"),
        # None but trusted hops: the client is inside.
        ("10.3.3.3, 10.1.1.1", "10.3.3.3"),
        # Garbage ends the walk at the last trusted hop.
        ("", "10.0.0.2"),
        ("unknown", "10.0.0.2"),
        ("203.0.113.9,", "10.0.0.2"),
        ("203.0.113.9, ,", "10.0.0.2"),
        ("203.0.113.9, unknown", "10.0.0.2"),
        ("203.0.113.9, unknown, 10.1.1.1", "10.1.1.1"),
        ("203.0.113.9, unix:", "10.0.0.2"),
        (b"203.0.113.9", "10.0.0.2"),
        (7, "10.0.0.2"),
        (["203.0.113.9"], "10.0.0.2"),
    ],
)
def test_a_chain_is_walked_from_the_right(chain: Any, address: str) -> None:
    assert ClientIP.build(PROXIES).address(request("10.0.0.2", chain)) == address


def test_a_prefix_written_by_the_client_mints_no_identity() -> None:
    client = ClientIP.build(PROXIES)
    forged = ["1.2.3.{}, 203.0.113.9", "{}, 203.0.113.9", "10.0.0.{}, 203.0.113.9", "{},,, 203.0.113.9"]
    identities = {client.identity(request(chain=text.format(n))) for text in forged for n in range(20)}
    assert identities == {"203.0.113.9"}


@pytest.mark.parametrize("peer", ["198.51.100.7", "2001:db8::7", "11.0.0.1", "", "unix:", "?"])
def test_an_untrusted_peer_is_the_client_whatever_it_sends(peer: str) -> None:
    client = ClientIP.build(PROXIES, exempt=["203.0.113.9"])
    headed = ClientIP.build(PROXIES, "CF-Connecting-IP", exempt=["203.0.113.9"])
    forged = request(peer, "203.0.113.9", HTTP_CF_CONNECTING_IP="203.0.113.9", HTTP_FORWARDED="for=203.0.113.9")
    for one in (client, headed, ClientIP()):
        assert one.identity(forged) == one.identity(request(peer))
        assert not one.is_exempt(forged)


@pytest.mark.parametrize(
    ("peer", "chain", "address"),
    [
        ("", "203.0.113.9", "203.0.113.9"),
        (None, "203.0.113.9", "203.0.113.9"),
        ("unix:", "203.0.113.9", "203.0.113.9"),
        ("", "1.1.1.1, 203.0.113.9, unix:", "203.0.113.9"),
        ("", "1.1.1.1, 203.0.113.9,", "203.0.113.9"),
        ("", "unix:", None),
        ("", "unknown", None),
        ("", None, None),
        ("10.0.0.2", "203.0.113.9", "10.0.0.2"),
        ("?", "203.0.113.9", None),
    ],
)
def test_a_unix_socket(peer: Any, chain: str | None, address: str | None) -> None:
    assert ClientIP.build("unix").address(request(peer, chain)) == address


def test_a_proxy_behind_a_unix_socket_behind_a_proxy() -> None:
    client = ClientIP.build(["unix", "10.0.0.0/8"])
    assert client.address(request("", "1.1.1.1, 203.0.113.9, 10.1.1.1")) == "203.0.113.9"
    assert client.address(request("10.0.0.2", "203.0.113.9, unix:")) == "203.0.113.9"


@pytest.mark.parametrize(
    ("hops", "chain", "address"),
    [
        (1, "203.0.113.9", "203.0.113.9"),
        (1, "1.1.1.1, 203.0.113.9", "203.0.113.9"),
        (2, "203.0.113.9, 172.16.0.1", "203.0.113.9"),
        (2, "1.1.1.1, 203.0.113.9, 172.16.0.1", "203.0.113.9"),
        (2, "1.1.1.1,203.0.113.9:80,unix:", "203.0.113.9"),
        (3, "2001:db8::5, 172.16.0.1, 172.16.0.2", "2001:db8::5"),
        # Too short: the left-most entry.
        (3, "203.0.113.9, 172.16.0.2", "203.0.113.9"),
        (3, "203.0.113.9", "203.0.113.9"),
        # Garbage at its place: the nearest hop that is known.
        (1, "203.0.113.9,", "10.0.0.2"),
        (2, "unknown, 172.16.0.1", "172.16.0.1"),
        (2, "1.1.1.1, unknown, 172.16.0.1", "172.16.0.1"),
        (2, "1.1.1.1, unknown, unix:", "10.0.0.2"),
        (3, "", "10.0.0.2"),
        (3, None, "10.0.0.2"),
        (50, ", ".join(["203.0.113.9", *["172.16.0.1"] * 49]), "203.0.113.9"),
        (50, ", ".join(["1.1.1.1", "203.0.113.9", *["172.16.0.1"] * 49]), "203.0.113.9"),
    ],
)
def test_a_number_of_hops(hops: int, chain: str | None, address: str) -> None:
    client = ClientIP.build(hops)
    assert client.address(request("10.0.0.2", chain)) == address
    assert client.address(request("", chain)) == (None if address == "10.0.0.2" else address)


def test_no_hops_are_no_proxies() -> None:
    assert ClientIP.build(0).address(request("10.0.0.2", "203.0.113.9")) == "10.0.0.2"


def test_only_the_end_of_a_long_chain_is_looked_at() -> None:
    client = ClientIP.build(PROXIES)
    spam = "1.1.1.1, " * 120_000
    assert client.address(request(chain=spam + "203.0.113.9")) == "203.0.113.9"
    assert client.address(request(chain=spam)) == "10.0.0.2"
    hops = ", ".join(["10.1.1.1"] * 60)
    assert client.address(request(chain=f"203.0.113.9, {hops}")) == "10.1.1.1"


def test_what_a_cut_leaves_of_an_address_is_no_address() -> None:
    tail = ("," + "10.1.1.1".rjust(87)) * 46 + "," + "10.1.1.1".rjust(37)
    chain = "203.0.113.91" + tail
    assert chain[-4096:].startswith("3.0.113.91,")
    assert ClientIP.build(PROXIES).address(request(chain=chain)) == "10.1.1.1"
    assert ClientIP.build(48).address(request(chain=chain)) == "10.1.1.1"
    assert ClientIP.build(PROXIES).address(request(chain=chain[2:])) == "3.0.113.91"


# ------------------------------------------------------------------------------------ a header of one address


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("203.0.113.9", "203.0.113.9"),
        (" 203.0.113.9:80 ", "203.0.113.9"),
        ("[2001:db8::5]:443", "2001:db8::5"),
        ("10.1.1.1", "10.1.1.1"),
        # Not exactly one: it doesn't count, and no other header is read in its place.
        ("1.1.1.1,203.0.113.9", "10.0.0.2"),
        ("203.0.113.9,", "10.0.0.2"),
        ("", "10.0.0.2"),
        ("unknown", "10.0.0.2"),
        (" " * 1_000_000, "10.0.0.2"),
        (None, "10.0.0.2"),
        (b"203.0.113.9", "10.0.0.2"),
    ],
)
@pytest.mark.parametrize("trusted", [PROXIES, 1, 2])
def test_a_header_of_one_address(trusted: Any, value: Any, address: str) -> None:
    client = ClientIP.build(trusted, "CF-Connecting-IP")
    assert client.address(request("10.0.0.2", "198.51.100.1", HTTP_CF_CONNECTING_IP=value)) == address


def test_two_visitors_behind_a_proxy_have_two_identities() -> None:
    for client in (ClientIP.build("127.0.0.1"), ClientIP.build(1)):
        assert client.identity(request("127.0.0.1", "198.51.100.1")) == "198.51.100.1"
        assert client.identity(request("127.0.0.1", "198.51.100.2")) == "198.51.100.2"


# -------------------------------------------------------------------------------------------------- exemption


@pytest.mark.parametrize(
    ("trusted", "header", "meta", "exempt"),
    [
        # No proxy: the peer.
        ((), None, request("192.0.2.7"), True),
        ((), None, request("192.0.2.7:8080"), True),
        ((), None, request("::ffff:192.0.2.7"), True),
        ((), None, request("203.0.113.9"), False),
        ((), None, request("2001:db8:aaaa::1"), True),
        # A peer that forwards without being trusted is a proxy that nobody named, or a forger.
        ((), None, request("127.0.0.1"), True),
        ((), None, request("127.0.0.1", "203.0.113.9"), False),
        ((), None, request("127.0.0.1", "192.0.2.7"), False),
        ((), None, request("127.0.0.1", HTTP_X_REAL_IP="203.0.113.9"), False),
        ((), None, request("127.0.0.1", HTTP_FORWARDED="for=203.0.113.9"), False),
        ((), None, request("127.0.0.1", HTTP_X_FORWARDED_PROTO="https"), False),
        (["10.0.0.0/8"], None, request("127.0.0.1", "203.0.113.9"), False),
        (["10.0.0.0/8"], "Fly-Client-IP", request("127.0.0.1", HTTP_FLY_CLIENT_IP="192.0.2.7"), False),
        (["10.0.0.0/8"], None, request("203.0.113.9", "192.0.2.7"), False),
        # A trusted peer: the address that its header gives.
        (["127.0.0.1"], None, request("127.0.0.1", "192.0.2.7"), True),
        (["127.0.0.1"], None, request("127.0.0.1", "203.0.113.9"), False),
        (["127.0.0.1"], None, request("127.0.0.1", "192.0.2.7, 203.0.113.9"), False),
        (["127.0.0.1", "192.0.2.0/24"], None, request("127.0.0.1", "192.0.2.7, 192.0.2.8"), True),
        ("unix", None, request("", "192.0.2.7"), True),
        (1, None, request("127.0.0.1", "192.0.2.7"), True),
        (1, None, request("127.0.0.1", "192.0.2.7, 203.0.113.9"), False),
        # Its own health check, without a header.
        (["127.0.0.1"], None, request("127.0.0.1"), True),
        # A header that cannot be read exempts nobody, though the proxy itself is in the list.
        (["127.0.0.1"], None, request("127.0.0.1", "unknown"), False),
        (["127.0.0.1"], None, request("127.0.0.1", ""), False),
        (["127.0.0.1", "192.0.2.7"], None, request("127.0.0.1", "x, 192.0.2.7"), False),
        (2, None, request("127.0.0.1", "x, 192.0.2.7"), False),
        (2, None, request("127.0.0.1", "192.0.2.7"), False),
        (["127.0.0.1"], "X-Real-IP", request("127.0.0.1", HTTP_X_REAL_IP="1.1.1.1,192.0.2.7"), False),
        (["127.0.0.1"], "X-Real-IP", request("127.0.0.1", "192.0.2.7"), False),
        (["127.0.0.1"], "X-Real-IP", request("127.0.0.1", HTTP_X_REAL_IP="192.0.2.7"), True),
        (["127.0.0.1"], "Fly-Client-IP", request("127.0.0.1", HTTP_FLY_CLIENT_IP="x"), False),
    ],
)
def test_who_is_exempt(trusted: Any, header: str | None, meta: dict[str, Any], exempt: bool) -> None:
    listed = ["127.0.0.1", "192.0.2.7", "2001:db8:aaaa::/48"]
    assert ClientIP.build(trusted, header, exempt=listed).is_exempt(meta) is exempt
    assert ClientIP.build(trusted, header).is_exempt(meta) is False


def test_exemption_is_of_an_address_and_not_of_its_network() -> None:
    client = ClientIP.build(exempt=["2001:db8::1"])
    assert client.is_exempt(request("2001:db8::1"))
    assert not client.is_exempt(request("2001:db8::2"))


def test_networks_that_are_written_in_ipv6_wrapping() -> None:
    client = ClientIP.build(["::ffff:10.0.0.0/104"], exempt=["64:ff9b::192.0.2.7", "::ffff:0:0/96"])
    assert client.address(request("10.0.0.2", "203.0.113.9")) == "203.0.113.9"
    assert client.is_exempt(request("192.0.2.7"))


# --------------------------------------------------------------------------------------------------- warnings


def test_forwarded_headers_without_a_proxy_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for n in range(5):
        ClientIP().identity(request("172.17.0.1", f"203.0.113.{n}"))
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "ratelimit_kv"
    assert "TRUSTED_PROXIES" in caplog.records[0].getMessage()


@pytest.mark.parametrize("header", ["HTTP_X_REAL_IP", "HTTP_FORWARDED"])
def test_other_forwarded_headers_too(header: str, caplog: pytest.LogCaptureFixture) -> None:
    ClientIP().identity(request(**{header: "203.0.113.9"}))
    assert len(caplog.records) == 1


def test_a_request_without_an_address_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for peer in ("", None, "x" * 1_000_000, b"1.2.3.4"):
        assert ClientIP().identity(request(peer)) == UNKNOWN
    assert len(caplog.records) == 1
    assert "unix" in caplog.records[0].getMessage()


def test_an_unreadable_header_of_a_proxy_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for trusted, header in ((PROXIES, None), (1, None), (1, "X-Forwarded-Host")):
        client = ClientIP.build(trusted, header)
        client.identity(request("10.0.0.2", "x\n" * 9999, HTTP_X_FORWARDED_HOST="y\n" * 99))
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "\n" not in message
    assert len(message) < 400


def test_an_ordinary_request_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ClientIP().identity(request("203.0.113.9"))
    client = ClientIP.build(PROXIES)
    client.identity(request("10.0.0.2", "203.0.113.9"))
    client.identity(request("10.0.0.2"))
    client.identity(request("203.0.113.9", "1.1.1.1"))
    assert not caplog.records


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given_settings", "path", "message"),
    [
        ({"trusted": ["10.0.0.0/8", "10.0.0.1/8"]}, "TRUSTED_PROXIES[1]", "Did you mean '10.0.0.0/8'?"),
        ({"trusted": ["10.0.0.0/33"]}, "TRUSTED_PROXIES[0]", "'10.0.0.0/33' is not an address or network"),
        ({"trusted": ["10.0.0.1:80"]}, "TRUSTED_PROXIES[0]", "Did you mean '10.0.0.1'?"),
        ({"trusted": ["proxy.internal"]}, "TRUSTED_PROXIES[0]", "Write addresses and networks"),
        ({"trusted": ["Unix"]}, "TRUSTED_PROXIES[0]", "'Unix' is not"),
        ({"trusted": [10]}, "TRUSTED_PROXIES[0]", "10 is not a text"),
        ({"trusted": [None]}, "TRUSTED_PROXIES[0]", "None is not a text"),
        ({"trusted": "10.0.0.0/8, nginx"}, "TRUSTED_PROXIES", "'nginx' is not"),
        ({"trusted": "2"}, "TRUSTED_PROXIES", "without quotes"),
        ({"trusted": None}, "TRUSTED_PROXIES", "Write ()"),
        ({"trusted": True}, "TRUSTED_PROXIES", "True is not"),
        ({"trusted": -1}, "TRUSTED_PROXIES", "from 0 to 50"),
        ({"trusted": 51}, "TRUSTED_PROXIES", "from 0 to 50"),
        ({"trusted": 1.5}, "TRUSTED_PROXIES", "1.5 is not a list"),
        ({"trusted": {"10.0.0.0/8": True}}, "TRUSTED_PROXIES", "is not a list"),
        ({"header": "CF-Connecting-IP"}, "CLIENT_IP_HEADER", "never read"),
        ({"header": "CF-Connecting-IP", "trusted": 0}, "CLIENT_IP_HEADER", "never read"),
        ({"header": "", "trusted": 1}, "CLIENT_IP_HEADER", "'' is not the name of a header"),
        ({"header": "X Real IP", "trusted": 1}, "CLIENT_IP_HEADER", "is not the name of a header"),
        ({"header": 5, "trusted": 1}, "CLIENT_IP_HEADER", "5 is not"),
        ({"header": "HTTP_X_REAL_IP", "trusted": 1}, "CLIENT_IP_HEADER", "Did you mean 'X-Real-Ip'?"),
        ({"header": "X-Forwarded-For", "trusted": 1}, "CLIENT_IP_HEADER", "Write None"),
        ({"header": "HTTP_X_FORWARDED_FOR", "trusted": 1}, "CLIENT_IP_HEADER", "Write None"),
        ({"header": "Forwarded", "trusted": 1}, "CLIENT_IP_HEADER", "RFC 7239"),
        ({"ipv4_prefix": 33}, "IPV4_PREFIX", "33 is not a number of bits. Write one from 16 to 32."),
        ({"ipv4_prefix": "24"}, "IPV4_PREFIX", "'24' is not"),
        ({"ipv4_prefix": True}, "IPV4_PREFIX", "True is not"),
        ({"ipv6_prefix": 32}, "IPV6_PREFIX", "from 48 to 128"),
        ({"ipv6_prefix": None}, "IPV6_PREFIX", "None is not"),
        ({"exempt": ["unix"]}, "EXEMPT_IPS[0]", "'unix' is not"),
        ({"exempt": ["192.0.2.7/24"]}, "EXEMPT_IPS[0]", "Did you mean '192.0.2.0/24'?"),
        ({"exempt": 5}, "EXEMPT_IPS", "5 is not a list"),
    ],
)
def test_settings_that_cannot_be_used(given_settings: dict[str, Any], path: str, message: str) -> None:
    [(found_path, found)] = problems(**given_settings)
    assert found_path == path
    assert message in found
    with pytest.raises(ProxyError) as error:
        ClientIP.build(**given_settings)
    assert str(error.value) == f"{path}: {found}"


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ProxyError) as error:
        ClientIP.build(["x", "y"], "Forwarded", 99, 99, ["z"])
    paths = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert paths == [
        "TRUSTED_PROXIES[0]",
        "TRUSTED_PROXIES[1]",
        "CLIENT_IP_HEADER",
        "IPV4_PREFIX",
        "EXEMPT_IPS[0]",
    ]


@pytest.mark.parametrize(
    "trusted",
    [
        ["10.0.0.0/8", "unix", "2001:db8::/32", "192.0.2.1"],
        ("10.0.0.0/8", "unix", "2001:db8::/32", "192.0.2.1"),
        {"10.0.0.0/8", "unix", "2001:db8::/32", "192.0.2.1"},
        "10.0.0.0/8,unix, 2001:db8::/32 192.0.2.1",
        ["10.0.0.0/255.0.0.0", "unix", " 2001:db8::/32 ", "192.0.2.1/32"],
    ],
)
def test_ways_to_write_the_proxies(trusted: Any) -> None:
    assert problems(trusted) == []
    client = ClientIP.build(trusted)
    for peer in ("10.0.0.2", "", "2001:db8::9", "192.0.2.1"):
        assert client.address(request(peer, "203.0.113.9")) == "203.0.113.9"
    assert client.address(request("192.0.2.2", "203.0.113.9")) == "192.0.2.2"


def test_equal_settings_make_equal_clients() -> None:
    assert ClientIP.build(PROXIES) == ClientIP.build(PROXIES)
    assert ClientIP.build(PROXIES) != ClientIP.build(PROXIES[:1])
    assert ClientIP.build() == ClientIP()


@pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0", "::ffff:0:0/96"])
def test_settings_that_let_everyone_in_are_warned_of(network: str) -> None:
    assert problems(["10.0.0.0/8", network]) == []
    [(path, message)] = warnings(["10.0.0.0/8", "unix", network])
    assert path == "TRUSTED_PROXIES"
    assert "trusts everyone" in message
    [(path, message)] = warnings(exempt=[network])
    assert path == "EXEMPT_IPS"
    assert "exempts everyone" in message


@pytest.mark.parametrize("value", [(), ["10.0.0.0/8"], "unix", 3, None, ["x"], True, object()])
def test_other_settings_are_not_warned_of(value: Any) -> None:
    assert warnings(value, value) == []


# ------------------------------------------------------------------------------------- whatever META contains

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=20),
    st.text(max_size=60),
    st.lists(st.text(max_size=5), max_size=2),
    st.ip_addresses().map(str),
    st.lists(st.one_of(st.ip_addresses().map(str), st.text(max_size=8)), max_size=60).map(", ".join),
)
headers = st.dictionaries(
    st.sampled_from(["HTTP_X_FORWARDED_FOR", "HTTP_X_REAL_IP", "HTTP_FORWARDED", "HTTP_VIA", "QUERY_STRING"]),
    anything,
)
proxy_settings = st.sampled_from([((), None), (PROXIES, None), (PROXIES, "X-Real-IP"), (["unix"], None)])
counted = st.sampled_from([(1, None), (3, None), (1, "X-Real-IP")])


@unhurried
@given(anything, headers, st.one_of(proxy_settings, counted))
def test_nothing_in_meta_raises(peer: Any, headers: dict[str, Any], given_settings: tuple[Any, Any]) -> None:
    client = ClientIP.build(*given_settings, exempt=["192.0.2.0/24"])
    meta = {"REMOTE_ADDR": peer, **headers}
    address, identity = client.address(meta), client.identity(meta)
    assert client.is_exempt(meta) in (True, False)
    if address is None:
        assert identity == UNKNOWN
    else:
        assert str(ipaddress.ip_address(address)) == address
        assert cut(address, 32, 64) == identity


@unhurried
@given(st.one_of(st.ip_addresses().map(str), anything), headers, proxy_settings)
def test_headers_of_an_untrusted_peer_change_nothing(
    peer: Any, headers: dict[str, Any], given_settings: tuple[Any, Any]
) -> None:
    client = ClientIP.build(*given_settings, exempt=["192.0.2.0/24"])
    bare = {"REMOTE_ADDR": peer}
    trusted = client.unix and peer in (None, "", "unix:")
    if (address := client.address(bare)) is not None:
        trusted = any(ipaddress.ip_address(address) in ipaddress.ip_network(one) for one in client.networks)
    if not trusted:
        assert client.identity({**bare, **headers}) == client.identity(bare)
        assert client.is_exempt({**bare, **headers}) <= client.is_exempt(bare)


@unhurried
@given(st.text(max_size=200), st.integers(1, 3))
def test_what_a_client_sends_ahead_of_a_proxy_changes_nothing(prefix: str, hops: int) -> None:
    tail = ["203.0.113.9", "10.1.1.1", "10.1.1.2"][: hops + 1]
    for client in (ClientIP.build(PROXIES), ClientIP.build(len(tail))):
        assert client.address(request("10.0.0.2", ", ".join([prefix, *tail]))) == "203.0.113.9"


# ------------------------------------------------------------------------------------------------------ speed


def test_an_address_that_was_seen_before_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, behind = ClientIP(), ClientIP.build(PROXIES, exempt=["192.0.2.0/24"])
    calls = [(plain, request("203.0.113.77")), (behind, request("10.0.0.77", "203.0.113.78, 10.0.0.79"))]
    first = [(client.identity(meta), client.is_exempt(meta)) for client, meta in calls]

    def refuse(text: str) -> None:
        raise AssertionError(f"parsed {text} again")

    monkeypatch.setattr(client_ip, "ip_address", refuse)
    assert [(client.identity(meta), client.is_exempt(meta)) for client, meta in calls] == first


def test_many_addresses_do_not_grow_memory() -> None:
    client = ClientIP.build(["10.0.0.0/8"])
    for n in range(10_000):
        address = str(ipaddress.IPv4Address(0xCB00_0000 + n))
        client.identity(request(address))
        client.identity(request(chain=address))
    caches: list[Any] = [client_ip._cut, client_ip._canonical, client._is_trusted]
    for cache in caches:
        assert cache.cache_info().currsize <= 4096
