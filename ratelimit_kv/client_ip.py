"""From where a request comes: the one address that a client cannot choose.

``REMOTE_ADDR`` is the peer, the machine at the other end of the connection. It is the client, unless it is
one of the project's own proxies; only then is a header believed, and exactly one header is read.

``X-Forwarded-For`` is a chain. Each proxy appends whom it was called by: the right-most entry was written
by the peer, the one before by the proxy which that entry names, and so on. From the right, an entry is
worth as much as the hop that wrote it, and the first one that is not a trusted hop is the client. What
stands further left, the client may have written. A header of one address (``CLIENT_IP_HEADER``) counts if
it holds exactly one: of two, joined by a comma, the client sent one.

Nothing here raises during a request, whatever ``META`` holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import inet_aton, inet_ntoa
from typing import Any, TypeAlias

__all__ = ["UNKNOWN", "ClientIP", "ProxyError", "cut", "problems", "warnings"]

logger = logging.getLogger("ratelimit_kv")

UNKNOWN = "unknown"
"""The identity of every request without a usable address: they share one counter."""

_Address: TypeAlias = IPv4Address | IPv6Address
_Network: TypeAlias = IPv4Network | IPv6Network

_FORWARDED_FOR = "HTTP_X_FORWARDED_FOR"
# Headers in which a proxy passes its caller's address on.
_PASSED_ON = (_FORWARDED_FOR, "HTTP_FORWARDED", "HTTP_X_REAL_IP")
# Headers by which somebody between the client and us shows up.
_FORWARDING = (
    *_PASSED_ON,
    "HTTP_X_FORWARDED_HOST",
    "HTTP_X_FORWARDED_PROTO",
    "HTTP_VIA",
    "HTTP_X_CLIENT_IP",
    "HTTP_TRUE_CLIENT_IP",
    "HTTP_CF_CONNECTING_IP",
)
# A caller on a unix socket: what servers put into REMOTE_ADDR, and what nginx writes into a chain.
_UNIX = ("", "unix:")
_UNREADABLE = "?"

_MAX_HOPS = 50
_LONGEST_CHAIN = 4096
_LONGEST_ADDRESS = 100  # brackets, an IPv6 address, a zone, a port and some spaces
_CACHED = 4096  # each entry is a few hundred bytes; callers beyond that cost microseconds, not memory

_EMBEDDED = (
    IPv6Network("::ffff:0:0/96"),  # IPv4-mapped, RFC 4291 section 2.5.5.2
    IPv6Network("64:ff9b::/96"),  # NAT64, the well-known prefix of RFC 6052
)


class ProxyError(ValueError):
    """Settings that cannot be used: a line for each says what is given, what is wrong and what to write."""


# -------------------------------------------------------------------------------------------------- addresses


def _parse(text: str) -> _Address | None:
    """The address without port, brackets and zone, and out of its IPv6 wrapping. None when there is none."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, bracket, port = host[1:].partition("]")
        if not bracket:
            return None
    elif host.count(":") == 1:
        host, colon, port = host.partition(":")
        port = colon + port
    if port and not re.fullmatch(r":\d{1,5}", port, re.ASCII):
        return None
    if ":" in host:
        host = host.partition("%")[0]  # a zone names an interface of one machine, not a client
    try:
        address = ip_address(host)  # no short, octal or hexadecimal forms, no digits but ASCII's
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and any(address in network for network in _EMBEDDED):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _is_plain_ipv4(text: str) -> bool:
    """Whether it is a canonical IPv4 address and no more."""
    try:
        return inet_ntoa(inet_aton(text)) == text
    except (OSError, ValueError):  # not even one of the forms that the C library takes
        return False


@lru_cache(maxsize=_CACHED)
def _canonical(text: str) -> str | None:
    address = _parse(text)
    return None if address is None else str(address)


@lru_cache(maxsize=_CACHED)
def _cut(text: str, ipv4_prefix: int, ipv6_prefix: int) -> str | None:
    # Almost every address is four numbers, and stays as it is: twenty times as fast as to parse it.
    if ipv4_prefix == 32 and _is_plain_ipv4(text):
        return text
    address = _parse(text)
    if address is None:
        return None
    prefix = ipv4_prefix if address.version == 4 else ipv6_prefix
    host_bits = address.max_prefixlen - prefix
    if host_bits == 0:
        return str(address)
    if not 0 < host_bits <= address.max_prefixlen:
        return None
    return f"{type(address)(int(address) >> host_bits << host_bits)}/{prefix}"


def _read(text: str) -> str | None:
    """The canonical text of an address that a client may have sent: long ones get no place in a cache."""
    return _canonical(text) if len(text) <= _LONGEST_ADDRESS else None


def cut(address_text: str, ipv4_prefix: int, ipv6_prefix: int) -> str | None:
    """The identity of an address as a person types it or a proxy sends it: canonical, cut to its prefix.

    ``"203.0.113.9:41822"`` is ``"203.0.113.9"`` with ``ipv4_prefix`` 32 and ``"203.0.113.0/24"`` with 24;
    ``"[2001:db8:1:2::3]:443"`` is ``"2001:db8:1:2::/64"`` with ``ipv6_prefix`` 64. Zones are dropped;
    IPv4-mapped and NAT64 addresses are the IPv4 address in them. An identity reads back as itself, and a
    network that is not wider than the prefix as the identity that it lies in.

    None when the text is not an address, or the prefix does not exist. Never raises.
    """
    address, slash, length = address_text.partition("/")
    if len(address) > _LONGEST_ADDRESS:
        return None
    identity = _cut(address, ipv4_prefix, ipv6_prefix)
    if slash and identity is not None:
        whole, prefix = (128, ipv6_prefix) if ":" in identity else (32, ipv4_prefix)
        if not re.fullmatch(r"\d{1,3}", length, re.ASCII) or not prefix <= int(length) <= whole:
            return None
    return identity


def _in_any(networks: Sequence[_Network]) -> Callable[[str], bool]:
    """A function that tells whether the address in a text is in one of the networks, and remembers it."""

    @lru_cache(maxsize=_CACHED)
    def contains(text: str) -> bool:
        address = _parse(text)
        return address is not None and any(address in network for network in networks)

    return contains


# --------------------------------------------------------------------------------------------------- settings


_HOW = "Write addresses and networks such as '203.0.113.9', '10.0.0.0/8' or '2001:db8::/32'."


def _network(entry: object) -> _Network:
    """Raises ValueError, which says what is wrong with the entry and what to write."""
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is not a text. {_HOW}")
    text = entry.strip()
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        close = _read(text)
        guess = f" Did you mean '{close}'?" if close else ""
        raise ValueError(f"{entry!r} is not an address or network.{guess} {_HOW}") from None
    try:
        ip_network(text)
    except ValueError:
        raise ValueError(f"{entry!r} has bits beyond its prefix. Did you mean '{network}'?") from None
    # Addresses are compared out of their IPv6 wrapping.
    for embedding in _EMBEDDED:
        if isinstance(network, IPv6Network) and network.subnet_of(embedding):
            return IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


def _entries(name: str, value: object) -> list[tuple[str, object]]:
    """(path, entry) for each entry of a list, or of a text with commas or spaces from the environment."""
    if isinstance(value, str):
        return [(name, entry) for entry in re.split(r"[\s,]+", value) if entry]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{name}[{position}]", entry) for position, entry in enumerate(value)]
    raise ValueError(f"{value!r} is not a list. {_HOW}")


def _networks(name: str, value: object, word: str = "") -> tuple[list[_Network], list[tuple[str, str]]]:
    """The networks of a setting, and what is wrong with its other entries, one allowed word apart."""
    networks: list[_Network] = []
    found: list[tuple[str, str]] = []
    try:
        entries = _entries(name, value)
    except ValueError as error:
        return [], [(name, str(error))]
    for path, entry in entries:
        if word and entry == word:
            continue
        try:
            networks.append(_network(entry))
        except ValueError as error:
            found.append((path, str(error)))
    return networks, found


def _trusted_problems(trusted: object) -> list[tuple[str, str]]:
    if isinstance(trusted, bool) or trusted is None:
        problem = f"{trusted!r} is not a list of networks. Write () to trust nobody. {_HOW}"
    elif isinstance(trusted, str) and re.fullmatch(r"\s*\d+\s*", trusted, re.ASCII):
        problem = f"{trusted!r} is a text. Write a number of proxies without quotes."
    elif not isinstance(trusted, int):
        return _networks("TRUSTED_PROXIES", trusted, "unix")[1]
    elif 0 <= trusted <= _MAX_HOPS:
        return []
    else:
        problem = f"{trusted!r} is not a number of proxies. Write one from 0 to {_MAX_HOPS}."
    return [("TRUSTED_PROXIES", problem)]


def _header_problem(trusted: object, header: object) -> str:
    if header is None:
        return ""
    if not isinstance(header, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", header):
        return f"{header!r} is not the name of a header. Write one such as 'CF-Connecting-IP', or None."
    name = header.lower()
    if name in ("x-forwarded-for", "http_x_forwarded_for"):
        return f"{header!r} is a chain, which is read without being named. Write None."
    if name in ("forwarded", "http_forwarded"):
        return (
            f"{header!r} (RFC 7239) is not read. Let the proxy send X-Forwarded-For and write None, or a "
            "header of one address and write its name."
        )
    if "_" in header:
        guess = "-".join(word.capitalize() for word in name.removeprefix("http_").split("_") if word)
        return f"{header!r} is how META spells it. Did you mean '{guess}'?"
    if not trusted:
        return f"{header!r} is never read, since no proxy is trusted. Name the proxies in TRUSTED_PROXIES."
    return ""


def problems(
    trusted: object = (),
    header: object = None,
    ipv4_prefix: object = 32,
    ipv6_prefix: object = 64,
    exempt: object = (),
) -> list[tuple[str, str]]:
    """(path of the setting, what is given, wrong and to be written), for each that cannot be used."""
    found = _trusted_problems(trusted)
    if problem := _header_problem(trusted, header):
        found.append(("CLIENT_IP_HEADER", problem))
    for name, bits, low, high in (
        ("IPV4_PREFIX", ipv4_prefix, 16, 32),
        ("IPV6_PREFIX", ipv6_prefix, 48, 128),
    ):
        if type(bits) is not int or not low <= bits <= high:
            found.append((name, f"{bits!r} is not a number of bits. Write one from {low} to {high}."))
    return found + _networks("EXEMPT_IPS", exempt)[1]


def warnings(trusted: object = (), exempt: object = ()) -> list[tuple[str, str]]:
    """(path of the setting, what it does and what to write), for each that works but lets everyone in."""
    believed = "trusts everyone: clients choose their own address. Write the networks of your proxies."
    unlimited = "exempts everyone. Write the networks that need it, or ENABLED: False."
    return [
        (name, f"'{network}' {means}")
        for name, value, means in (
            ("TRUSTED_PROXIES", trusted, believed),
            ("EXEMPT_IPS", exempt, unlimited),
        )
        for network in _networks(name, value, "unix")[0]
        if network.prefixlen == 0
    ]


# ------------------------------------------------------------------------------------------------- the client

_warned: dict[str, object] = {}


def _warn_once(kind: str, message: str, *arguments: object) -> None:
    """One record of a kind in a process, however many threads come here at once."""
    mine = object()
    if _warned.setdefault(kind, mine) is mine:
        logger.warning(message, *arguments)


@dataclass(frozen=True, slots=True)
class ClientIP:
    """Who is the client of a request. Built once from settings with :meth:`build`, which checks them."""

    networks: tuple[_Network, ...] = ()
    """Proxies that are trusted by their address."""
    unix: bool = False
    """Whether a caller on a unix socket is a trusted proxy."""
    hops: int = 0
    """How many proxies stand in front, when they are trusted by their number: 0 when they are not."""
    header: str = ""
    """Key in META of the header that holds one address; empty when the chain is read."""
    ipv4_prefix: int = 32
    """Bits of an IPv4 address that make an identity, from 16 to 32."""
    ipv6_prefix: int = 64
    """Bits of an IPv6 address that make an identity, from 48 to 128. A customer has a /64 at least."""
    exempt: tuple[_Network, ...] = ()
    """Clients that are not limited."""

    _is_trusted: Callable[[str], bool] = field(init=False, repr=False, compare=False)
    _is_listed: Callable[[str], bool] = field(init=False, repr=False, compare=False)
    _trusts_anyone: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_is_trusted", _in_any(self.networks))
        object.__setattr__(self, "_is_listed", _in_any(self.exempt))
        object.__setattr__(self, "_trusts_anyone", bool(self.networks or self.unix or self.hops))

    @classmethod
    def build(
        cls,
        trusted: Sequence[str] | int | str = (),
        header: str | None = None,
        ipv4_prefix: int = 32,
        ipv6_prefix: int = 64,
        exempt: Sequence[str] = (),
    ) -> ClientIP:
        """From the settings TRUSTED_PROXIES, CLIENT_IP_HEADER, IPV4_PREFIX, IPV6_PREFIX and EXEMPT_IPS.

        ``trusted`` is a list of addresses and networks, or a text of them with commas; the word "unix"
        among them trusts a caller without an address, on a unix socket. Or it is the number of proxies in
        front, for those whose addresses change: the peer is then trusted whoever it is, and the client is
        the entry of the chain at that place from the right. That is safe only where nobody can reach the
        server past the proxies: those that were passed by did not write what is counted as theirs. When the
        chain is shorter than the number, its left-most entry is the client: whoever can send a short chain
        can also send a full one, so this gives nothing away, and it is right where one proxy of several
        does not append.

        Raises ProxyError, with a line for each of the :func:`problems`.
        """
        if found := problems(trusted, header, ipv4_prefix, ipv6_prefix, exempt):
            raise ProxyError("\n".join(f"{path}: {problem}" for path, problem in found))
        hops = trusted if isinstance(trusted, int) else 0
        listed = () if isinstance(trusted, int) else trusted
        return cls(
            tuple(_networks("", listed, "unix")[0]),
            any(entry == "unix" for _, entry in _entries("", listed)),
            hops,
            f"HTTP_{header.upper().replace('-', '_')}" if header else "",
            ipv4_prefix,
            ipv6_prefix,
            tuple(_networks("", exempt)[0]),
        )

    def address(self, meta: Mapping[str, Any]) -> str | None:
        """The client's whole address as canonical text, "203.0.113.9" or "2001:db8::1", None without one."""
        return _canonical(self._find(meta)[0])

    def identity(self, meta: Mapping[str, Any], ipv6_prefix: int | None = None) -> str:
        """The client's address cut to its prefix: "203.0.113.9", "203.0.113.0/24", "2001:db8:1:2::/64".

        ``ipv6_prefix``, from 0 to 128, stands in for the setting. Without a usable address the identity is
        UNKNOWN, which is logged once.
        """
        client: Any = meta.get("REMOTE_ADDR")
        if (
            self._trusts_anyone
            or type(client) is not str
            or len(client) > _LONGEST_ADDRESS
            or not meta.keys().isdisjoint(_PASSED_ON)
        ):  # else almost every request's way is over
            client = self._find(meta)[0]
        prefix = self.ipv6_prefix if ipv6_prefix is None else ipv6_prefix
        identity = _cut(client, self.ipv4_prefix, prefix)
        if identity is None:
            _warn_once(
                "unknown",
                "A request has no usable address (REMOTE_ADDR is %.100r). All of them share one counter, "
                "ip:unknown. Behind a unix socket, write 'unix' in TRUSTED_PROXIES and let the proxy send "
                "X-Forwarded-For.",
                meta.get("REMOTE_ADDR"),
            )
            return UNKNOWN
        return identity

    def is_exempt(self, meta: Mapping[str, Any]) -> bool:
        """Whether the client is in EXEMPT_IPS.

        When a header shows that somebody stands in between, the address has to come out of the header that
        is read. So a peer that is not trusted exempts nobody then, nor does a proxy whose header cannot be
        read: else an entry that matches the proxy would exempt everyone behind it.
        """
        if not self.exempt:
            return False
        client, forwarded = self._find(meta)
        if not forwarded and (self.header in meta or any(name in meta for name in _FORWARDING)):
            return False
        return self._is_listed(client)

    def _find(self, meta: Mapping[str, Any]) -> tuple[str, bool]:
        """(the client's address, not yet canonical; whether it came out of a header)."""
        peer = meta.get("REMOTE_ADDR")
        if peer is None:
            peer = ""  # ASGI servers leave it out for a unix socket
        elif not isinstance(peer, str) or len(peer) > _LONGEST_ADDRESS:
            peer = _UNREADABLE
        if not self._trusts_anyone:
            if not meta.keys().isdisjoint(_PASSED_ON):
                _warn_once(
                    "forwarded",
                    "A request from %.100r carries forwarded addresses, which nobody is trusted to send. If that "
                    "is your proxy, name it in TRUSTED_PROXIES: until then all clients behind it share one "
                    "counter.",
                    peer,
                )
            return peer, False
        if not (self.hops or self._is_trusted(peer) or (self.unix and peer in _UNIX)):
            return peer, False
        value = meta.get(self.header or _FORWARDED_FOR)
        if not isinstance(value, str):
            return peer, False
        if not self.header:
            return self._count(peer, _chain(value)) if self.hops else self._walk(peer, _chain(value))
        address = _read(value)
        if address is None:
            _warn_unreadable(value)
            return peer, False
        return address, True

    def _walk(self, peer: str, entries: list[str]) -> tuple[str, bool]:
        """The first entry that is not a trusted hop, else the last hop that was reached."""
        client, read = peer, False
        for entry in entries:
            address = _read(entry)
            if address is not None:
                client, read = address, True
                if not self._is_trusted(address):
                    break
            elif self.unix and entry.strip() in _UNIX:
                read = False
            else:
                # Empty entries too: a hop that doesn't know its caller vouches for nothing further left.
                _warn_unreadable(entry)
                return client, False
        return client, read

    def _count(self, peer: str, entries: list[str]) -> tuple[str, bool]:
        """The entry that the outermost proxy wrote, else the nearest one to its right that is an address."""
        for position in range(min(self.hops, len(entries)), 0, -1):
            address = _read(entries[position - 1])
            if address is not None:
                return address, position == self.hops
            _warn_unreadable(entries[position - 1])
        return peer, False


def _chain(header: str) -> list[str]:
    """The entries from right to left, as many as a real chain can have."""
    entries = header[-_LONGEST_CHAIN:].rsplit(",", _MAX_HOPS)
    if len(header) > _LONGEST_CHAIN or len(entries) > _MAX_HOPS:
        entries[0] = _UNREADABLE  # what the cut has left may look like another address
    entries.reverse()
    return entries


def _warn_unreadable(text: str) -> None:
    _warn_once(
        "unreadable",
        "A trusted proxy sent %.100r where one address was expected, so the client counts as the last proxy "
        "that is known. Let the proxy append (or, for CLIENT_IP_HEADER, set) the address of its caller.",
        text,
    )
