"""Who is asking: keys, and the identities that they make of a request.

A key is one or more alternatives (``a|b``: the first that answers), each of one or more parts (``a+b``: both together).
An identity is text for a store's key: every part is ``kind:value``, the kind set by us, the value percent-encoded to an
alphabet without spaces, control, glob and brace characters, ``+``, ``|`` and ``%``; a value that starts with ``~`` is a
keyed digest, made where the value may be a secret or is long.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import hmac
import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, unquote

from asgiref.sync import sync_to_async
from django.contrib.sessions.backends.signed_cookies import SessionStore as SignedSession
from django.http import HttpRequest, QueryDict
from django.utils.functional import LazyObject, empty

from .callables import CallableError, Function, load_function
from .client_ip import ClientIP, cut
from .steps import Step, Steps

__all__ = ["Identities", "Key", "Part", "parse_key"]

NAMED = ("header", "cookie", "field", "arg", "claim")
"""Kinds that are written ``kind:NAME``."""
PLAIN = ("ip", "user", "session", "everyone")
"""Kinds that need no name. ``ip/56`` is ``ip`` with IPv6 addresses cut to that prefix."""
SECRET = frozenset(("header", "cookie", "session", "field", "arg", "claim"))
"""Kinds whose value may be a secret or a personal datum: always a digest."""
CLIENT_CHOSEN = frozenset(("header", "cookie", "field"))
"""Kinds whose value the client makes up as he likes, so that each new value is a new budget."""
BODY_LIMIT = 64 * 1024
"""Bytes of a request body that ``field:`` reads; a larger body has no fields for us."""
LONGEST = 96
"""Characters of an identity; a longer one is a digest."""

_SAFE = "-._:@/,="
_NAME = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Identities:
    """How identities are written: from the settings, once."""

    client_ip: ClientIP
    digest_key: bytes
    hash_all: bool = False
    session_cookie: str = "sessionid"

    @classmethod
    def build(cls, client_ip: ClientIP, secret: str, hash_all: bool, session_cookie: str) -> Identities:
        """``secret`` is HASH_KEY or SECRET_KEY; the key of our digests is bound to this purpose alone."""
        key = hmac.digest(secret.encode(), b"ratelimit_kv identity 1", hashlib.sha256)
        return cls(client_ip, key, hash_all, session_cookie)

    def write(self, part: Part, value: str) -> str:
        """The part of an identity for a raw value."""
        kind = part.kind
        if not self.hash_all and kind not in SECRET:
            text = f"{kind}:{encode(value)}"
            if len(text) <= LONGEST:
                return text
        return f"{kind}:~{self.digest(kind, part.name, value)}"

    def digest(self, *words: str) -> str:
        """128 bits of HMAC-SHA256 (RFC 2104) over the words, base64url: 22 characters."""
        message = b"\0".join(word.encode("utf-8", "surrogatepass") for word in words)
        return base64.urlsafe_b64encode(hmac.digest(self.digest_key, message, hashlib.sha256)[:16])[:-2].decode()

    def join(self, parts: list[str]) -> str:
        """One identity of several parts."""
        text = "+".join(parts)
        return text if len(text) <= LONGEST else f"all:~{self.digest('all', text)}"

    def ip(self, request: HttpRequest, ipv6_prefix: int | None = None) -> str:
        """The identity of the request's address, with the IPv6 prefix in it: ``ip:2001:db8:1:2::/64``."""
        text = self.client_ip.identity(request.META, ipv6_prefix)
        return f"ip:{text}" if not self.hash_all else f"ip:~{self.digest('ip', '', text)}"

    def is_exempt(self, request: HttpRequest) -> bool:
        """Whether the client's resolved address is in EXEMPT_IPS."""
        return self.client_ip.is_exempt(request.META)


def encode(value: str) -> str:
    """Percent-encode (RFC 3986) to the alphabet of identities. ``~`` is encoded too: it marks a digest."""
    if value.isascii() and value.isalnum():
        return value
    return quote(value, safe=_SAFE, encoding="utf-8", errors="surrogatepass").replace("~", "%7E")


@dataclass(frozen=True, slots=True)
class Part:
    """One thing about a request that tells callers apart."""

    kind: str
    name: str = ""
    prefix: int | None = None
    function: Function | None = None
    meta: str = field(default="", compare=False)
    """``header``: the name in ``request.META``."""
    read: Callable[[HttpRequest, Identities], Any] = field(init=False, repr=False, compare=False)
    """The part's text, None when the request has none, or this part itself when finding out has to wait."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "read", partial(_READERS[self.kind], self))

    def step(self, request: HttpRequest, ids: Identities) -> Step:
        """Find out by waiting: for ``user``, ``session`` and functions. The result is text or None."""
        if self.kind == "user":
            return Step(self._user, self._auser, (request, ids))
        if self.kind == "session":
            return Step(self._session, self._asession, (request, ids))
        assert self.function is not None
        call = self.function.step(request)

        async def acall() -> str | None:
            return self._written(await call.arun(*call.args), ids)

        return Step(lambda: self._written(call.run(*call.args), ids), acall)

    def _written(self, value: Any, ids: Identities) -> str | None:
        if value is None or value == "":
            return None
        if type(value) is int:
            value = str(value)
        if not isinstance(value, str):
            assert self.function is not None
            raise CallableError(self.function, f"returned {type(value).__name__}; a key returns text, an int or None")
        return ids.write(self, str(value))

    def _of_user(self, user: Any, ids: Identities) -> str | None:
        if user is None or not getattr(user, "is_authenticated", False):
            return None
        pk = getattr(user, "pk", None)
        return None if pk is None or pk == "" else ids.write(self, str(pk))

    def _user(self, request: HttpRequest, ids: Identities) -> str | None:
        return self._of_user(request.user, ids)

    async def _auser(self, request: HttpRequest, ids: Identities) -> str | None:
        if hasattr(request, "auser") and _is_djangos(request.user):
            return self._of_user(await request.auser(), ids)
        return await sync_to_async(self._user)(request, ids)

    def _of_session(self, request: HttpRequest, ids: Identities) -> str | None:
        # A backend that does not know the cookie's key drops it while loading, so made-up keys do not get here.
        key = request.session.session_key
        return ids.write(self, key) if key and not request.session.is_empty() else None

    def _session(self, request: HttpRequest, ids: Identities) -> str | None:
        request.session.get("")  # loads it
        return self._of_session(request, ids)

    async def _asession(self, request: HttpRequest, ids: Identities) -> str | None:
        await request.session.aget("")
        return self._of_session(request, ids)


def preferred_type(request: HttpRequest, kinds: tuple[str, ...]) -> str | None:
    """Which of the media types the client likes best by its Accept header, None when it takes anything. The first of the types has to be named.

    As Django's own, which reads all headers of every request for it.
    """
    accept = str(request.META.get("HTTP_ACCEPT", "*/*"))
    return None if accept == "*/*" else _preferred_type(accept[:1000], kinds)


@lru_cache(maxsize=1024)
def _preferred_type(accept: str, kinds: tuple[str, ...]) -> str | None:
    asker = HttpRequest()
    asker.META["HTTP_ACCEPT"] = accept
    kind = asker.get_preferred_type(kinds)
    # The first is also what "*/*" and "text/*" mean: it has to be named.
    named = kind != kinds[0] or any(str(one).startswith(kinds[0]) for one in asker.accepted_types)
    return kind if named else None


def _is_djangos(user: Any) -> bool:
    """Whether it is the lazy object of AuthenticationMiddleware, not yet evaluated."""
    if not isinstance(user, LazyObject) or user._wrapped is not empty:
        return False
    return getattr(user.__dict__.get("_setupfunc"), "__module__", "") == "django.contrib.auth.middleware"


def _read_ip(part: Part, request: HttpRequest, ids: Identities) -> Any:
    return ids.ip(request, part.prefix)


def _read_everyone(part: Part, request: HttpRequest, ids: Identities) -> Any:
    return "everyone"


def _read_user(part: Part, request: HttpRequest, ids: Identities) -> Any:
    user: Any = getattr(request, "user", None)
    if user is None:
        return None
    if isinstance(user, LazyObject) and user._wrapped is empty:
        # No credential, no user: do not touch the session, or every anonymous page varies on the cookie.
        if _is_djangos(user) and ids.session_cookie not in request.COOKIES:
            return None
        return part
    return part._of_user(user, ids)


def _read_session(part: Part, request: HttpRequest, ids: Identities) -> Any:
    session = getattr(request, "session", None)
    if session is None or ids.session_cookie not in request.COOKIES:
        return None
    # A signed session is the cookie itself, signed anew at every change: whoever keeps them all is as many callers.
    return None if isinstance(session, SignedSession) else part


def _read_header(part: Part, request: HttpRequest, ids: Identities) -> Any:
    value = request.META.get(part.meta)
    if not isinstance(value, str) or not (value := value.strip()):
        return None
    return ids.write(part, value)


def _read_cookie(part: Part, request: HttpRequest, ids: Identities) -> Any:
    value = request.COOKIES.get(part.name)
    return ids.write(part, value) if value else None


def _read_arg(part: Part, request: HttpRequest, ids: Identities) -> Any:
    match = getattr(request, "resolver_match", None)
    value = match.kwargs.get(part.name) if match is not None else None
    return None if value is None or value == "" else ids.write(part, str(value))


def _read_claim(part: Part, request: HttpRequest, ids: Identities) -> Any:
    claims: Any = getattr(request, "auth", None)
    if claims is None or isinstance(claims, str | bytes):
        return None
    try:
        value = claims[part.name] if hasattr(claims, "__getitem__") else getattr(claims, part.name, None)
    except (KeyError, IndexError, TypeError):
        return None
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        return None
    return ids.write(part, str(value))


def _read_field(part: Part, request: HttpRequest, ids: Identities) -> Any:
    value = _form_value(request, part.name)
    if isinstance(value, bool | int | float):
        value = str(value)
    if not isinstance(value, str):
        return None
    value = fold(value)
    return ids.write(part, value) if value else None


def fold(text: str) -> str:
    """One spelling for all that a person takes for the same name: NFKD without marks, stripped, casefolded.

    And for what databases that compare by a collation take for it: digits of all scripts, what cannot be seen at all,
    letters with a stroke and ligatures, which NFKD leaves alone.
    """
    # Marks go first: to put thousands of them in order, as NFKD does, takes seconds. Composed letters bring new ones, and
    # casefolding too (a dotted capital I). Upper case first, for databases compare by it, and there a dotless i is an I.
    text = _bare(unicodedata.normalize("NFKD", _bare(text))).upper().casefold()
    text = _bare(unicodedata.normalize("NFKD", text)).strip()
    if text.isascii():
        return text
    return "".join(str(unicodedata.digit(char, char)) for char in text.translate(_STROKES))


_STROKES = str.maketrans({"đ": "d", "ð": "d", "ħ": "h", "ł": "l", "ø": "o", "ŧ": "t", "æ": "ae", "œ": "oe", "þ": "th"})
"""Plain letters for those that the Unicode collations of MySQL and MariaDB compare as such."""


def _bare(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        for char in text
        if not unicodedata.combining(char) and unicodedata.category(char) not in ("Mn", "Me", "Cf", "Cc")
    )


def _form_value(request: HttpRequest, name: str) -> Any:
    had_post = hasattr(request, "_post")
    try:
        if not hasattr(request, "_body"):
            if had_post and getattr(request, "_read_started", True):
                return request.POST.get(name)  # parsed from the stream, which is spent
            declared = request.META.get("CONTENT_LENGTH")
            if (int(declared) if declared else _measured(request)) > BODY_LIMIT:
                return None
        body = request.body
        if not body or (len(body) > BODY_LIMIT and not had_post):
            return None
        form, data = _in_form(request, body, name), _in_json(body, name)
        # A body that is both tells the view and us what it likes: '{"name": "alice", "x": "&name=mallory&"}'.
        return (data if form is None else form) if form is None or data is None else None
    except Exception:  # noqa: BLE001 - a hostile body, or an upload handler of the project; such a field is missing
        if not had_post:
            # Django marks a body that it could not parse as parsed and empty; the view shall meet the error itself.
            request.__dict__.pop("_post", None)
            request.__dict__.pop("_files", None)
        return None


def _in_form(request: HttpRequest, body: bytes, name: str) -> str | None:
    if request.method != "POST" and request.content_type == "application/x-www-form-urlencoded":
        return QueryDict(body, encoding=request.encoding or "utf-8").get(name)
    is_form = request.content_type in ("application/x-www-form-urlencoded", "multipart/form-data")
    return request.POST.get(name) if hasattr(request, "_post") or (is_form and request.method == "POST") else None


def _in_json(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    return data.get(name) if isinstance(data, dict) else None


def _measured(request: HttpRequest) -> int:
    """Bytes of a body that came in chunks: under ASGI Django has put it into a file before anybody asks."""
    stream: Any = getattr(request, "_stream", None)
    if getattr(request, "_read_started", False) or not (hasattr(stream, "seekable") and stream.seekable()):
        return 0
    size: int = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def _read_call(part: Part, request: HttpRequest, ids: Identities) -> Any:
    return part


_READERS: dict[str, Callable[[Part, HttpRequest, Identities], Any]] = {
    "ip": _read_ip,
    "everyone": _read_everyone,
    "user": _read_user,
    "session": _read_session,
    "header": _read_header,
    "cookie": _read_cookie,
    "arg": _read_arg,
    "claim": _read_claim,
    "field": _read_field,
    "call": _read_call,
}


@dataclass(frozen=True, slots=True)
class Key:
    """The function that says who is asking."""

    text: str
    alternatives: tuple[tuple[Part, ...], ...]
    touches_user: bool = field(init=False, compare=False)
    """Whether it may read the user or the session."""
    is_everyone: bool = field(init=False, compare=False)
    """Whether all callers share one identity."""
    is_private: bool = field(init=False, compare=False)
    """Whether its numbers are the caller's own business: not those of everybody, of an account or of a page."""
    is_client_chosen: bool = field(init=False, compare=False)
    """Whether a client can mint identities: some alternative has a part that he makes up as he likes."""
    only: Part | None = field(init=False, compare=False)
    """The only part, when it is only one: the short way."""

    def __post_init__(self) -> None:
        parts = [part for alternative in self.alternatives for part in alternative]
        kinds = [{part.kind for part in alternative} for alternative in self.alternatives]
        put = partial(object.__setattr__, self)
        put("touches_user", any(part.kind in ("user", "session") for part in parts))
        put("is_everyone", kinds[-1] == {"everyone"})
        put("is_private", not any(kind <= {"everyone", "field", "arg"} for kind in kinds))
        put("is_client_chosen", any(kind & CLIENT_CHOSEN for kind in kinds))
        put("only", parts[0] if len(parts) == 1 else None)

    def quick(self, request: HttpRequest, ids: Identities, memo: MutableMapping[Part, str | None]) -> Any:
        """The identity, None when there is none, or the Part that has to wait before the key can answer.

        ``memo`` keeps what was found in this request, so that nothing is asked twice.
        """
        only = self.only
        if only is not None:
            return memo[only] if memo and only in memo else only.read(request, ids)
        for alternative in self.alternatives:
            texts: list[str] = []
            for part in alternative:
                text = memo[part] if part in memo else part.read(request, ids)
                if text is part:
                    return part
                if text is None:
                    break
                texts.append(text)
            else:
                return texts[0] if len(texts) == 1 else ids.join(texts)
        return None

    def identify(
        self, request: HttpRequest, ids: Identities, memo: MutableMapping[Part, str | None]
    ) -> Steps[str | None]:
        """The identity of a request, None when it has none. Raises CallableError for a function that fails."""
        while type(answer := self.quick(request, ids, memo)) is Part:
            memo[answer] = yield answer.step(request, ids)
        return answer  # type: ignore[no-any-return]

    def canonical(self, text: str, ids: Identities) -> str:
        """The identity that a person means by ``user:42``, ``ip:2001:db8::1`` or what a list showed: as requests have it.

        A value that is written in encoded form already, or as a digest (``~...``), is taken as it is.
        Raises ValueError for what is no identity at all.
        """
        text = text.strip()
        if (mine := self.find(text, ids)) is not None:
            return mine
        if text.startswith("all:~"):
            return text
        written = [self._canonical_part(piece, ids) for piece in _PIECES.split(text)]
        return written[0] if len(written) == 1 else ids.join(written)

    def find(self, text: str, ids: Identities, ip_stands_in: bool = False) -> str | None:
        """As :meth:`canonical`, None for whom this key does not count. Of several parts it takes those that it asks for.

        ``ip_stands_in``: whether an address alone is counted too, that of a caller without an identity.
        """
        text = text.strip()
        if text.startswith("all:~") and "+" not in text:
            return text if any(len(alternative) > 1 for alternative in self.alternatives) else None
        pieces = _PIECES.split(text)
        for alternative in self.alternatives:
            rest, mine = list(pieces), []
            for part in alternative:
                piece = next((one for one in rest if one.partition(":")[0] == part.kind), None)
                if piece is None:
                    break
                rest.remove(piece)
                mine.append(self._canonical_part(piece, ids, part))
            else:
                return mine[0] if len(mine) == 1 else ids.join(mine)
        address = next((one for one in pieces if one.startswith("ip:")), None)
        return self._canonical_part(address, ids, Part("ip")) if ip_stands_in and address is not None else None

    def _canonical_part(self, text: str, ids: Identities, part: Part | None = None) -> str:
        kind, colon, value = text.partition(":")
        if text == "everyone":
            return text
        if not colon or not value or kind not in _READERS:
            raise ValueError(
                f"{text!r} is not an identity. Write kind:value, for example user:42 or ip:203.0.113.9; "
                f"this scope counts by {self.text!r}."
            )
        if value.startswith("~"):
            return text
        part = part or Part(kind)
        if kind == "ip":
            if value == "unknown":
                return "ip:unknown"
            address, slash, prefix = value.partition("/")
            if slash and prefix.isdigit() and ":" in address:
                part = Part("ip", prefix=int(prefix))
            whole = ids.client_ip
            ipv6_prefix = whole.ipv6_prefix if part.prefix is None else part.prefix
            found = cut(address, whole.ipv4_prefix, ipv6_prefix)
            if found is None:
                raise ValueError(f"{value!r} is not an IP address. Write ip:203.0.113.9 or ip:2001:db8::1.")
            return f"ip:~{ids.digest('ip', '', found)}" if ids.hash_all else f"ip:{found}"
        if "%" in value and encode(plain := unquote(value, errors="surrogatepass")) == value:
            value = plain
        return ids.write(part, fold(value) if kind == "field" else value)


_PIECES = re.compile(r"\+(?=(?:" + "|".join(_READERS) + r"):|everyone\b)")


def parse_key(value: Any) -> Key:
    """The key of a setting: text like ``user|ip``, ``cookie:anon+ip``, ``header:X-Api-Key``, a dotted path or a callable.

    Raises ValueError that says what was given, what is wrong and what to write.
    """
    if callable(value):
        function = load_function(value)
        return Key(function.name, ((Part("call", function.name, function=function),),))
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a key. Write text like 'user|ip' or 'header:X-Api-Key', or a function.")
    texts = [[part.strip() for part in alternative.split("+")] for alternative in value.split("|")]
    alternatives = tuple(tuple(_parse_part(part, value) for part in alternative) for alternative in texts)
    return Key("|".join("+".join(alternative) for alternative in texts), alternatives)


def _parse_part(text: str, whole: str) -> Part:
    kind, colon, name = text.partition(":")
    if not colon:
        if text in PLAIN:
            return Part(text)
        if text.startswith("ip/"):
            digits = text[3:]
            if not digits.isascii() or not digits.isdigit() or not 32 <= int(digits) <= 128:
                raise ValueError(f"{text!r} is not a prefix of IPv6 addresses. Write ip/64, from ip/32 to ip/128.")
            return Part("ip", prefix=int(digits))
        if "." in text:
            function = load_function(text)
            return Part("call", text, function=function)
    elif kind in NAMED and _NAME.match(name):
        meta = ""
        if kind == "header":
            name = name.lower()
            meta = name.upper().replace("-", "_")
            if meta not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
                meta = f"HTTP_{meta}"
        return Part(kind, name, meta=meta)
    elif kind in NAMED:
        raise ValueError(
            f"{text!r} in the key {whole!r} needs a name after the colon, for example {kind}:{_EXAMPLE[kind]}."
        )
    words = [*PLAIN, *(f"{kind}:NAME" for kind in NAMED)]
    close = difflib.get_close_matches(text if not colon else kind, [*PLAIN, *NAMED], 1, 0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{text!r} in the key {whole!r} is unknown.{hint} A key is made of {', '.join(words)} or a dotted path."
    )


_EXAMPLE: Mapping[str, str] = {
    "header": "X-Api-Key",
    "cookie": "anon",
    "field": "username",
    "arg": "slug",
    "claim": "sub",
}
