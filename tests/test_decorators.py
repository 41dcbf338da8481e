"""``@rate_limit`` and ``@rate_limit_exempt``: what they refuse to be told, what they keep of a view, whom they limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod, wraps
from types import FunctionType
from typing import Any

import pytest
from django.contrib.auth.decorators import login_not_required, login_required
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.http import require_POST
from freezegun import freeze_time
from ninja import NinjaAPI
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from ratelimit_kv import RateLimited, check, hit, peek, rate_limit, rate_limit_exempt
from ratelimit_kv.conf import get_config
from tests.caches import child_environment
from tests.site import HALF_PAST, limit, statuses
from tests.views import Feed, Plain, plain


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def site(settings: Any) -> Callable[..., None]:
    """``site(view, other=view)``: a site of just these views, at ``/`` and ``/other``."""

    def use(view: Any = None, **others: Any) -> None:
        urlpatterns[:] = [path(name, one, name=name or "root") for name, one in others.items()]
        if view is not None:
            urlpatterns.append(path("", view, name="root"))
        settings.ROOT_URLCONF = "tests.urls"
        settings.ROOT_URLCONF = __name__

    return use


urlpatterns: list[Any] = []


def passed_through(view: Any) -> Any:
    """A decorator of somebody else."""

    @wraps(view)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return inner


def index(name: str, module: str) -> Any:
    """A view of that name, as if it stood in that module."""
    view = FunctionType(plain.__code__, plain.__globals__, name)
    view.__module__, view.__qualname__, view.__kwdefaults__ = module, name, plain.__kwdefaults__
    return view


# ---------------------------------------------------------------------------------------- what cannot be right


@pytest.mark.parametrize(
    ("decorate", "says"),
    [
        (lambda: rate_limit(plain), r'write @rate_limit\("5/m"\)'),
        (lambda: rate_limit(), "needs a rate or a scope"),
        (lambda: rate_limit(key="ip"), "needs a rate or a scope"),
        (lambda: rate_limit("5/m", kye="ip"), "no option 'kye'.* Did you mean 'key'"),
        (lambda: rate_limit("5/m", paths=["/"]), "no option 'paths'"),
        (lambda: rate_limit("login", key="ip"), "only cost and methods"),
        (lambda: rate_limit("login", scope="signin"), "a scope of the settings already"),
        (lambda: rate_limit("login", "5/m"), "mixes scopes and rates"),
        (lambda: rate_limit("5/m")(type("Thing", (), {})), "no dispatch"),
    ],
)
def test_what_cannot_be_right_is_a_type_error_at_once(decorate: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        decorate()


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (["5/month"], {}, "5/month"),
        (["-1/m"], {}, "-1/m"),
        (["5/m", "6/m"], {}, "two rates"),
        (["5/m"], {"key": "usr"}, "Did you mean 'user'"),
        (["5/m"], {"cost": -1}, "-1"),
        (["login"], {"cost": "many"}, "many"),
        (["5/m"], {"methods": "POST"}, r"\['POST'\]"),
        (["login"], {"methods": "POST"}, r"\['POST'\]"),
        (["5/m"], {"mode": "shadwo"}, "Did you mean 'shadow'"),
        (["5/m"], {"scope": "Sign Up"}, "Sign Up"),
        (["5/m"], {"count_if": "tests.nowhere.at_all"}, "tests.nowhere.at_all"),
        (["5/m"], {"message": "{ip} is too quick"}, "retry_after"),
    ],
)
def test_a_value_that_cannot_be_right_is_quoted_at_once(arguments: Any, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rate_limit(*arguments, **options)


def test_a_scope_that_nobody_has_written_is_an_error_that_helps(settings: Any, rf: RequestFactory) -> None:
    limit(settings, login="5/m")
    with pytest.raises(ImproperlyConfigured, match=r"no rate limit scope 'logn'.* Did you mean 'login'"):
        rate_limit("logn")(plain)(rf.get("/"))


def test_what_is_no_view_is_an_error_that_helps() -> None:
    with pytest.raises(TypeError, match="found no request"):
        rate_limit("5/m")(lambda *words: None)("no", "request")


# ------------------------------------------------------------------------------------------- what a view keeps


def test_a_view_keeps_what_it_is_known_by() -> None:
    def view(request: HttpRequest) -> HttpResponse:
        """What it does."""
        return HttpResponse()

    view.audience = "everybody"  # type: ignore[attr-defined]
    limited: Any = rate_limit("5/m")(login_not_required(view))
    assert limited.__name__ == "view"
    assert limited.__doc__ == "What it does."
    assert limited.__wrapped__ is view
    assert limited.audience == "everybody"
    assert limited.login_required is False


def test_a_view_is_given_all_of_its_arguments(rf: RequestFactory) -> None:
    @rate_limit("5/m")
    def view(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert view(rf.get("/"), 1, slug="tea") == ((1,), {"slug": "tea"})
    assert view(request=rf.get("/"), slug="tea") == ((), {"slug": "tea"})


def test_a_limited_class_limits_nobody_it_inherits_from(site: Any, client: Client) -> None:
    class Parent(Plain):
        pass

    @rate_limit("1/m", key="ip")
    class Child(Parent):
        pass

    class Grandchild(Child):
        pass

    site(parent=Parent.as_view(), child=Child.as_view(), grandchild=Grandchild.as_view(), plain=Plain.as_view())
    assert statuses(client, "/child", 2) == [200, 429]
    assert statuses(client, "/parent", 2) == [200, 200]
    assert statuses(client, "/plain", 2) == [200, 200]
    assert statuses(client, "/grandchild", 2) == [200, 429], "what it inherits limits it, by its own name"


@pytest.mark.parametrize("middleware", [False, True])
def test_the_limits_of_a_class_and_of_its_parent_both_hold(
    middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    @rate_limit("parent")
    class Parent(Plain):
        pass

    @rate_limit("child")
    class Child(Parent):
        pass

    limit(settings, middleware=middleware, parent="2/m", child="3/m")
    site(Child.as_view(), parent=Parent.as_view())
    assert statuses(client, "/", 3) == [200, 200, 429]
    assert peek("parent", "ip:127.0.0.1").remaining == 0


# --------------------------------------------------------------------------------------------- whom it limits


def test_it_refuses_without_being_told_to(site: Any, client: Client) -> None:
    site(rate_limit("1/m")(plain))
    assert statuses(client, "/", 2) == [200, 429]


def test_limits_stacked_on_a_view_all_hold_and_one_of_them_twice_counts_once(
    settings: Any, site: Any, client: Client
) -> None:
    limit(settings, short="2/m", long="4/h")
    site(rate_limit("short")(rate_limit("long")(rate_limit("short")(plain))))
    assert statuses(client, "/", 3) == [200, 200, 429]
    assert peek("long", "ip:127.0.0.1").remaining == 2, "the refused request cost nothing"


def test_several_rates_of_one_limit_all_hold(site: Any, client: Client, clock: Any) -> None:
    site(rate_limit("2/m", "3/h", key="ip")(plain))
    assert statuses(client, "/", 3) == [200, 200, 429]
    clock.tick(60)
    assert statuses(client, "/", 2) == [200, 429]


def test_only_the_methods_that_were_named_are_counted(site: Any, client: Client) -> None:
    site(rate_limit("1/m", methods=["POST"])(plain), get=rate_limit("1/m", methods=["GET"])(plain))
    assert statuses(client, "/", 3) == [200, 200, 200]
    assert statuses(client, "/", 2, "post") == [200, 429]
    assert statuses(client, "/get", 1, "head") == [200]
    assert statuses(client, "/get", 1) == [429], "HEAD is GET"


def test_a_scope_of_the_settings_may_cost_more_here(settings: Any, site: Any, client: Client) -> None:
    limit(settings, ask="10/h")
    site(rate_limit("ask", cost=4)(plain), cheap=rate_limit("ask")(plain), free=rate_limit("ask", cost=0)(plain))
    assert statuses(client, "/", 3) == [200, 200, 429]
    assert statuses(client, "/cheap", 3) == [200, 200, 429]
    assert statuses(client, "/free", 2) == [200, 200]


def by_size(request: HttpRequest) -> int:
    return int(request.GET["size"])


def test_a_cost_may_depend_on_the_request(settings: Any, site: Any, client: Client) -> None:
    limit(settings, ask="10/h")
    site(rate_limit("ask", cost=by_size)(plain))
    assert [client.get(f"/?size={size}").status_code for size in (6, 6, 3, 1, 0, 1)] == [200, 429, 200, 200, 200, 429]


def test_methods_here_leave_the_limit_that_settings_put_on_the_rest(settings: Any, site: Any, client: Client) -> None:
    """The decorator makes POST dear; GET is still under the site's limit."""
    limit(settings, middleware=True, site={"RATE": "10/h", "PATHS": ["*"], "KEY": "ip"})
    site(rate_limit("site", methods=["POST"], cost=5)(plain))
    assert statuses(client, "/", 2) == [200, 200]
    assert peek("site", "ip:127.0.0.1").remaining == 8
    assert statuses(client, "/", 2, "post") == [200, 429]


# ------------------------------------------------------------------------------------------------------- names


def test_views_of_one_name_in_two_modules_do_not_share_a_limit(site: Any, client: Client) -> None:
    limited = rate_limit("1/m")
    site(shop=limited(index("index", "shop.views")), blog=limited(index("index", "blog.views")))
    assert statuses(client, "/shop", 2) == [200, 429]
    assert statuses(client, "/blog", 2) == [200, 429]


def test_views_share_a_limit_of_one_name(site: Any, client: Client) -> None:
    limited = rate_limit("1/m", scope="pages")
    site(shop=limited(index("index", "shop.views")), blog=limited(index("index", "blog.views")))
    assert statuses(client, "/shop", 1) == [200]
    assert statuses(client, "/blog", 1) == [429]


def other(request: HttpRequest) -> HttpResponse:
    return HttpResponse("other")


class Orange:
    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Lemon(Orange):
    pass


class Other(Plain):
    pass


limited = rate_limit("1/m")
ninja = NinjaAPI(urls_namespace="fruit", docs_url=None)


@ninja.get("/orange")
@limited
def orange(request):
    return {}


@ninja.get("/lemon")
@limited
def lemon(request):
    return {}


@ninja.get("/melon")
@limited
def melon(request):
    return {}


@ninja.post("/melon")
@limited
def plant_melon(request):
    return {}


def ninja_view(name: str) -> Any:
    (patterns, _, _) = ninja.urls
    return next(pattern.callback for pattern in patterns if str(pattern.pattern) == name)


def hidden(view: Any) -> Any:
    """A decorator that does not say what is in it."""
    return lambda request: view(request)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (limited(partial(plain, a=1)), limited(partial(other))),
        (limited(partial(Plain.as_view())), limited(partial(Other.as_view()))),
        (limited(Orange()), limited(Lemon())),
        (limited(Plain.as_view()), limited(Other.as_view())),
        (limited(passed_through(plain)), limited(passed_through(other))),
        (hidden(limited(plain)), hidden(limited(other))),
        (limited(api_view()(plain)), limited(api_view()(other))),
        (api_view()(limited(plain)), api_view()(limited(other))),
        (ninja_view("orange"), ninja_view("lemon")),
    ],
    ids=[
        "partials",
        "classes in partials",
        "objects",
        "classes",
        "wrapped",
        "hidden",
        "above @api_view",
        "below",
        "Ninja",
    ],
)
@pytest.mark.parametrize("middleware", [False, True])
def test_two_views_do_not_share_a_limit_because_both_are_wrapped(
    one: Any, another: Any, middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    limit(settings, middleware=middleware)
    site(one=one, another=another)
    assert statuses(client, "/one", 2) == [200, 429]
    assert statuses(client, "/another", 2) == [200, 429]


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize("methods", [("get", "post"), ("post", "get")])
def test_two_operations_on_one_path_do_not_share_a_limit(
    methods: tuple[str, str], middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    limit(settings, middleware=middleware)
    site(ninja_view("melon"))
    for method in methods:
        assert statuses(client, "/", 2, method) == [200, 429]


def test_a_name_does_not_change_with_wrapping(site: Any, client: Client) -> None:
    limited = rate_limit("1/m")
    site(bare=limited(plain), above=limited(passed_through(plain)), below=passed_through(limited(plain)))
    assert statuses(client, "/bare", 1) == [200]
    assert statuses(client, "/above", 1) == [429]
    assert statuses(client, "/below", 1) == [429]


def by_address(request: HttpRequest) -> str:
    return request.META["REMOTE_ADDR"]


def test_limits_on_one_view_that_differ_are_counted_apart(site: Any, client: Client) -> None:
    site(rate_limit("2/m", methods=["POST"])(rate_limit("3/m", key=by_address)(rate_limit("4/m", key="ip")(plain))))
    assert statuses(client, "/", 3, "post") == [200, 200, 429]
    assert statuses(client, "/", 2) == [200, 429], "POST took two of the three of all methods"


def test_every_process_gives_a_limit_the_same_name() -> None:
    """Servers have several, and each is started anew: addresses of functions and the order of sets differ."""
    program = """
import django; django.setup()
from ratelimit_kv import rate_limit
from ratelimit_kv.marks import marks_of
from tests.test_decorators import by_address, by_size, plain
view = rate_limit("5/m", key=by_address, methods={"POST", "PUT", "PATCH", "DELETE"})(plain)
view = rate_limit(by_size, key="ip")(view)
print([mark.name_on(view) for mark in marks_of(view)])
"""
    names = {
        subprocess.check_output(
            [sys.executable, "-c", program], env={**child_environment(), "PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2", "3")
    }
    assert len(names) == 1, names


def test_applying_a_decorator_at_every_request_leaves_nothing_behind(site: Any, client: Client) -> None:
    """``method_decorator`` does so."""

    @method_decorator(rate_limit("100/m"), name="dispatch")
    class Decorated(Plain):
        pass

    site(Decorated.as_view())
    statuses(client, "/", 1)
    before = len(get_config()._inline)
    statuses(client, "/", 20)
    assert len(get_config()._inline) == before


# ------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("middleware", [False, True])
def test_a_view_may_ask_for_a_limit_and_raise_what_it_hears(
    middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    @rate_limit("page")
    def view(request: HttpRequest) -> HttpResponse:
        check(request, "ask").raise_if_denied()
        return HttpResponse()

    limit(settings, middleware=middleware, page="10/m", ask="1/m")
    site(view)
    answers = [client.get("/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1]["Retry-After"] == "30"
    assert '"ask";r=0' in answers[1]["RateLimit"]


@pytest.mark.parametrize("middleware", [False, True])
async def test_so_may_an_async_view(middleware: bool, settings: Any, site: Any, async_client: Any) -> None:
    from ratelimit_kv import acheck

    @rate_limit("page")
    async def view(request: HttpRequest) -> HttpResponse:
        (await acheck(request, "ask")).raise_if_denied()
        return HttpResponse()

    limit(settings, middleware=middleware, page="10/m", ask="1/m")
    site(view)
    answers = [await async_client.get("/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1]["Retry-After"] == "30"


def test_a_denial_is_answered_also_when_the_decorator_itself_did_not_count(
    settings: Any, site: Any, client: Client
) -> None:
    @rate_limit("page", methods=["POST"])
    def view(request: HttpRequest) -> HttpResponse:
        check(request, "ask").raise_if_denied()
        return HttpResponse()

    limit(settings, page="10/m", ask="1/m")
    site(view)
    assert statuses(client, "/", 2) == [200, 429]


def test_a_denial_without_a_request_is_answered_too(settings: Any, site: Any, client: Client) -> None:
    @rate_limit("page")
    def view(request: HttpRequest) -> HttpResponse:
        hit("mails", "user:42").raise_if_denied()
        return HttpResponse()

    limit(settings, page="10/m", mails={"RATE": "1/h", "MESSAGE": "No more mails for {retry_after}."})
    site(view)
    assert statuses(client, "/", 1) == [200]
    answer = client.get("/")
    assert answer.status_code == 429
    assert answer.content == b"No more mails for 60 minutes.\n"


def test_it_is_not_a_permission_that_was_denied(settings: Any, site: Any, client: Client) -> None:
    from django.core.exceptions import PermissionDenied

    assert not issubclass(RateLimited, PermissionDenied)


@pytest.mark.parametrize("error", [Http404, ValueError])
def test_other_exceptions_pass_and_have_counted(error: Any, site: Any, client: Client) -> None:
    @rate_limit("2/m", scope="ask")
    def view(request: HttpRequest) -> HttpResponse:
        raise error

    site(view)
    client.raise_request_exception = False
    assert statuses(client, "/", 3)[-1] == 429


# ---------------------------------------------------------------------------------------------------- exemption


class ExemptHandler(View):
    @rate_limit_exempt
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@rate_limit_exempt
class ExemptClass(Plain):
    pass


@method_decorator(rate_limit_exempt, name="dispatch")
class ExemptDispatch(Plain):
    pass


@rate_limit("strict")
@rate_limit_exempt
class ExemptBelow(Plain):
    pass


@rate_limit_exempt()
@rate_limit("strict")
class ExemptAbove(Plain):
    pass


@rate_limit("strict")
class ExemptHandlerOfLimitedClass(ExemptHandler):
    pass


@rate_limit_exempt
class ExemptSet(ViewSet):
    def list(self, request: Any) -> Response:
        return Response()


class SetWithExemptAction(ViewSet):
    @rate_limit_exempt
    def list(self, request: Any) -> Response:
        return Response()


@rate_limit_exempt
async def exempt_async(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


exempt_views = {
    "function": rate_limit_exempt(plain),
    "called": rate_limit_exempt()(plain),
    "async": exempt_async,
    "below": rate_limit("strict")(rate_limit_exempt(plain)),
    "above": rate_limit_exempt(rate_limit("strict")(plain)),
    "below a stranger": passed_through(rate_limit_exempt(rate_limit("strict")(plain))),
    "above a stranger": rate_limit_exempt(passed_through(rate_limit("strict")(plain))),
    "between": rate_limit("strict")(passed_through(rate_limit_exempt(rate_limit("strict")(plain)))),
    "below login_not_required": login_not_required(rate_limit_exempt(plain)),
    "class": ExemptClass.as_view(),
    "dispatch": ExemptDispatch.as_view(),
    "class below": ExemptBelow.as_view(),
    "class above": ExemptAbove.as_view(),
    "as_view": rate_limit_exempt(Plain.as_view()),
    "handler": ExemptHandler.as_view(),
    "handler of a limited class": ExemptHandlerOfLimitedClass.as_view(),
    "ViewSet": ExemptSet.as_view({"get": "list"}),
    "action": SetWithExemptAction.as_view({"get": "list"}),
    "partial": rate_limit_exempt(partial(plain)),
    "object": rate_limit_exempt(Feed()),
}


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize("name", exempt_views)
def test_exempt_is_exempt_from_every_limit_and_costs_nothing(
    name: str, middleware: bool, settings: Any, site: Any, client: Client, store_calls: list[str]
) -> None:
    limit(settings, middleware=middleware, strict="1/m", everything={"RATE": "1/m", "PATHS": ["*"]})
    site(exempt_views[name])
    answers = [client.get("/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert not any("RateLimit" in answer for answer in answers)
    assert store_calls == []


def test_a_handler_that_is_exempt_exempts_no_other(settings: Any, site: Any, client: Client) -> None:
    limit(settings, middleware=True, everything={"RATE": "1/m", "PATHS": ["*"]})
    site(ExemptHandler.as_view())
    assert statuses(client, "/", 2, "post") == [200, 429]
    assert statuses(client, "/", 2) == [200, 200]
    assert statuses(client, "/", 2, "head") == [200, 200]


class OneOfTwoExempt(View):
    @limited
    @rate_limit_exempt
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @limited
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @method_decorator(limited)
    @rate_limit_exempt
    def put(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @method_decorator(limited)
    def delete(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize("method", ["post", "delete"])
def test_one_decorator_on_two_handlers_is_exempt_on_the_one_that_is(
    method: str, middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    limit(settings, middleware=middleware)
    site(OneOfTwoExempt.as_view())
    assert statuses(client, "/", 2) == [200, 200]
    assert statuses(client, "/", 2, "put") == [200, 200]
    assert statuses(client, "/", 2, method) == [200, 429]


def test_a_limit_that_an_exempt_view_asks_for_lets_it_pass(settings: Any, site: Any, client: Client) -> None:
    @rate_limit_exempt
    def view(request: HttpRequest) -> HttpResponse:
        check(request, "ask").raise_if_denied()
        return HttpResponse()

    limit(settings, middleware=True, ask="1/m")
    site(view)
    assert statuses(client, "/", 3) == [200, 200, 200]


@pytest.fixture
def store_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of the store, as it happens."""
    from ratelimit_kv.stores.locmem import LocMemStore

    calls: list[str] = []
    for method in ("hit", "peek", "reset"):

        def spy(name: str, real: Any, self: Any, *args: Any) -> Any:
            calls.append(name)
            return real(self, *args)

        monkeypatch.setattr(LocMemStore, method, partialmethod(partial(spy, method, getattr(LocMemStore, method))))
    return calls


def test_a_request_that_another_decorator_refuses_first_is_not_counted_below_it(
    settings: Any, site: Any, client: Client
) -> None:
    limit(settings, middleware=True, ask="1/m")
    site(login_required(rate_limit("ask")(plain)), post=require_POST(rate_limit("ask")(plain)))
    assert statuses(client, "/", 2) == [302, 302]
    assert statuses(client, "/post", 2) == [405, 405]
    assert peek("ask", "ip:127.0.0.1").remaining == 1
