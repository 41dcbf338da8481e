"""The root URLconf of the workers, which add to it what they time."""

from django.http import HttpRequest, HttpResponse
from django.urls import path


def bare(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"ok")


urlpatterns = [path("bare/", bare)]
