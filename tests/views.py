"""The views of the test site. What they are limited by stands on them; how much that is, the tests say in settings."""

from functools import partial
from typing import Any

from asgiref.sync import markcoroutinefunction
from django.contrib.admin import AdminSite
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimit_kv import rate_limit

# ------------------------------------------------------------------------------------------------ without a limit


def plain(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse("hello")


async def plain_async(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse("hello")


class Plain(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    post = get


class PlainAPIView(APIView):
    """One that has opted out of whatever REST framework would do, as its own view for tokens does."""

    throttle_classes = ()

    def get(self, request: Any) -> Response:
        return Response("hello")


def echo(request: HttpRequest) -> HttpResponse:
    """What the view still sees of a request whose body the limiter may have read."""
    return JsonResponse({"body": request.body.decode("latin-1")})


def upload(request: HttpRequest) -> HttpResponse:
    """What the view still sees of a form."""
    files = {name: file.read().decode() for name, file in request.FILES.items()}
    return JsonResponse({"post": request.POST.dict(), "files": files})


def stream(request: HttpRequest) -> HttpResponse:
    """Reads the request as a stream, which a body that has been read would not allow."""
    return HttpResponse(request.read())


def who(request: HttpRequest) -> HttpResponse:
    """What the limiter has decided, as the view sees it."""
    limits = request.rate_limit  # type: ignore[attr-defined]
    return JsonResponse({decision.scope: decision.identity for decision in limits.decisions})


# --------------------------------------------------------------------------- doors: all are limited by scope "door"


@rate_limit("door")
def function(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


@rate_limit("door")
async def async_function(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


@rate_limit("door")
class OnClass(Plain):
    pass


@rate_limit("door")
def nothing(request: HttpRequest) -> None:
    """A mistake: it does not answer."""


class AsyncPlain(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    async def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")


@rate_limit("door")
class OnAsyncClass(AsyncPlain):
    pass


@method_decorator(rate_limit("door"), name="dispatch")
class OnDispatch(Plain):
    pass


@method_decorator(rate_limit("door"), name="dispatch")
class OnAsyncDispatch(AsyncPlain):
    pass


class OnHandler(View):
    @rate_limit("door")
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    post = get


class OnAsyncHandler(View):
    @rate_limit("door")
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    post = get


class OnDecoratedHandler(View):
    @method_decorator(rate_limit("door"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    post = get


def greet(request: HttpRequest, word: str) -> HttpResponse:
    return HttpResponse(word)


async def greet_async(request: HttpRequest, word: str) -> HttpResponse:
    return HttpResponse(word)


part = rate_limit("door")(partial(greet, word="hello"))
async_part = rate_limit("door")(partial(greet_async, word="hello"))


class Feed:
    """A view that is an object, such as those of django.contrib.syndication."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")


class AsyncFeed:
    def __init__(self) -> None:
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")


feed = rate_limit("door")(Feed())
async_feed = rate_limit("door")(AsyncFeed())


class Admin(AdminSite):
    @rate_limit("door")
    def login(self, request: HttpRequest, extra_context: Any = None) -> Any:
        return super().login(request, extra_context)


admin = Admin()


@rate_limit("door")
class OnAPIView(APIView):
    def get(self, request: Any) -> Response:
        return Response("hello")

    post = get


class OnAPIHandler(APIView):
    @rate_limit("door")
    def get(self, request: Any) -> Response:
        return Response("hello")

    post = get


@rate_limit("door")
@api_view(["GET", "POST"])
def above_api_view(request: Any) -> Response:
    return Response("hello")


@api_view(["GET", "POST"])
@rate_limit("door")
def below_api_view(request: Any) -> Response:
    return Response("hello")


ninja = NinjaAPI(urls_namespace="ninja", docs_url=None)


@ninja.api_operation(["GET", "POST"], "/sync")
@rate_limit("door")
def operation(request: HttpRequest) -> dict[str, str]:
    return {"word": "hello"}


@ninja.api_operation(["GET", "POST"], "/async")
@rate_limit("door")
async def async_operation(request: HttpRequest) -> dict[str, str]:
    return {"word": "hello"}


# -------------------------------------------------------------------------- views that authenticate by themselves


class Token(BaseAuthentication):
    """Whoever says his name is believed; nothing else is."""

    def authenticate(self, request: Any) -> Any:
        kind, _, name = request.headers.get("Authorization", "").partition(" ")
        if kind != "Token":
            raise AuthenticationFailed
        return User(pk=len(name) + sum(map(ord, name)), username=name), {"sub": name}

    def authenticate_header(self, request: Any) -> str:
        return "Token"


class Guarded(APIView):
    authentication_classes = [Token]

    @rate_limit("door")
    def get(self, request: Any) -> Response:
        return Response(request.user.username)
