"""What a decorator leaves on a view, and how it is found again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.urls import URLPattern, URLResolver, get_resolver

from .callables import Function
from .scopes import Scope, digest_name

__all__ = [
    "EXEMPT",
    "HERE",
    "MARKS",
    "Here",
    "Mark",
    "exempt_methods",
    "here",
    "hoistable",
    "is_exempt",
    "marks_of",
    "operations",
    "shows",
    "view_class_of",
    "view_name",
    "views",
]

MARKS = "rate_limit_marks"
"""Attribute with the marks of a view: a tuple, which ``functools.wraps`` copies outwards."""
HERE = "rate_limit_here"
"""Attribute with the marks that stand directly on a callable, and that callable."""
EXEMPT = "rate_limit_exempt"
"""Attribute of an exempt view."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """One use of ``@rate_limit``: names of scopes, or one inline definition. Equal only to itself."""

    names: tuple[str, ...] = ()
    """Scopes of the settings."""
    scopes: tuple[Scope, ...] = ()
    """Inline: the definition, parsed; its name and the defaults of the settings are not known yet."""
    given: frozenset[str] = frozenset()
    """Inline: the options that were written down, in upper case."""
    scope: str = ""
    """Inline: the name given, "" for one after the view."""
    cost: int | Function | None = None
    """With names: what a hit weighs here."""
    methods: frozenset[str] | None = None
    """With names: only these methods."""
    suffix: str = field(init=False, repr=False)
    """Inline: what tells limits of one view apart, the same in every process."""

    def __post_init__(self) -> None:
        suffix = ""
        if self.scopes:
            one = self.scopes[0]
            rates = one.rate.name if one.rate is not None else [(str(rate), rate.timezone) for rate in one.rates or ()]
            own = repr((rates, one.key.text, sorted(one.methods or ()), one.algorithm))
            suffix = hashlib.blake2b(own.encode(), digest_size=3).hexdigest()
        object.__setattr__(self, "suffix", suffix)

    @property
    def is_inline(self) -> bool:
        """Whether it defines its own scope."""
        return not self.names

    def name_on(self, view: Any) -> str:
        """The scope name of an inline mark on the view that Django resolved.

        Stable, and distinct for limits of one view that differ in rates, key or methods.
        """
        return self.scope or digest_name(f"{view_name(view)}.{self.suffix}")


def view_name(view: Any) -> str:
    """Module and qualified name of a view: of its class when it has one (``view_class``, ``cls``), else of the function.

    What is wrapped around it does not change it.
    """
    while not (named := view_class_of(view)):
        inside = getattr(view, "__wrapped__", None) or (view.func if isinstance(view, functools.partial) else None)
        if inside is None:
            named = view if hasattr(view, "__qualname__") else type(view)
            break
        view = inside
    # The classes that @api_view makes have the function's name, but not as their qualified one.
    place, dot, _ = named.__qualname__.rpartition(".")
    return f"{named.__module__}.{place}{dot}{named.__name__}".replace("<locals>.", "").replace("<lambda>", "lambda")


def view_class_of(view: Any) -> Any:
    """The class that a view was made of by ``as_view()``, None when it is a function or an object."""
    return getattr(view, "view_class", None) or getattr(view, "cls", None)


def marks_of(view: Any) -> tuple[Mark, ...]:
    """All marks on a view that can be found from outside, outermost first, then those on the handlers of its class."""
    view_class = view_class_of(view)
    names = {*getattr(view_class, "http_method_names", ()), *(getattr(view, "actions", None) or {}).values()}
    handlers = (getattr(view_class, name, None) for name in sorted(names))
    return tuple(dict.fromkeys(mark for place in (view, *handlers) for mark in getattr(place, MARKS, ())))


def shows(view: Any, mark: Mark) -> bool:
    """Whether a mark on a view can be found from outside."""
    return mark in getattr(view, MARKS, ()) or mark in marks_of(view)


def is_exempt(view: Any) -> bool:
    """Whether the view, or the class it was made of, is marked exempt."""
    return bool(getattr(view, EXEMPT, False) or getattr(view_class_of(view), EXEMPT, False))


def exempt_methods(view: Any) -> frozenset[str]:
    """The methods whose handlers in the view's class are marked exempt."""
    view_class = view_class_of(view)
    actions = getattr(view, "actions", None)  # of a ViewSet: method -> name of its handler
    names = dict(actions or {name: name for name in getattr(view_class, "http_method_names", ())})
    if not hasattr(view_class, "head"):
        names["head"] = names.get("get", "get")
    return frozenset(
        method.upper() for method, name in names.items() if getattr(getattr(view_class, name, None), EXEMPT, False)
    )


class Here(NamedTuple):
    """Marks with no other decorator between them, and the callable that they stand on.

    ``functools.wraps`` copies attributes outwards, so a callable is asked whether it is the owner of what it carries.
    """

    owner: Any
    marks: tuple[Mark, ...]


def here(view: Any) -> tuple[Mark, ...]:
    """The marks that stand directly on a callable: what its outermost decorators decide in one call."""
    found: Here | None = getattr(view, HERE, None)
    return found.marks if found is not None and found.owner is view else ()


def hoistable(view: Any) -> tuple[Mark, ...]:
    """The marks that may be decided before the view: those directly on the very callable that Django resolved.

    ``as_view()`` copies attributes from ``dispatch``, so marks on the class's own dispatch count too. Views of REST
    framework authenticate inside, so their marks wait (``cls`` is how its views show themselves).
    """
    if hasattr(view, "cls"):
        return ()
    dispatch = getattr(getattr(view, "view_class", None), "dispatch", None)
    # A decorator around as_view() copies ``view_class`` outwards; what it wraps is then the view, not what dispatch wraps.
    is_bare = getattr(view, "__wrapped__", None) is getattr(dispatch, "__wrapped__", None)
    return here(view) or (here(dispatch) if is_bare else ())


def operations(view: Any) -> Iterator[Any]:
    """The functions that answer behind one view of Ninja, which keeps them in its closure. None for other views."""
    if str(getattr(view, "__module__", "")).startswith("ninja."):
        for cell in getattr(view, "__closure__", None) or ():
            for operation in getattr(cell.cell_contents, "operations", ()):
                yield operation.view_func


def views(urlconf: Any = None) -> Iterator[tuple[str, str, Any]]:
    """Route, view name for ``reverse`` ("" if none) and callable of every URL pattern, in the order of the URLconf.

    Behind a view of Ninja come its operations, for it is they that are decorated.
    """
    yield from _walk(get_resolver(urlconf), "/", ())


def _walk(resolver: URLResolver, route: str, namespaces: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    for entry in resolver.url_patterns:
        here = route + str(entry.pattern)
        if isinstance(entry, URLPattern):
            name = ":".join((*namespaces, entry.name)) if entry.name else ""
            yield here, name, entry.callback
            for operation in operations(entry.callback):
                yield here, name, operation
        elif isinstance(entry, URLResolver):
            inner = (*namespaces, entry.namespace) if entry.namespace else namespaces
            yield from _walk(entry, here, inner)
