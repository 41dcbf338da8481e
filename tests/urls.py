from django.conf.urls.i18n import i18n_patterns
from django.urls import path

from tests import views

urlpatterns = [
    # Nobody's limit but that of settings.
    path("plain", views.plain, name="plain"),
    path("plain-async", views.plain_async, name="plain-async"),
    path("class", views.Plain.as_view(), name="class"),
    path("drf", views.PlainAPIView.as_view(), name="drf"),
    path("item/<slug:slug>", views.plain, name="item"),
    path("login/", views.plain, name="login"),
    path("echo", views.echo, name="echo"),
    path("upload", views.upload, name="upload"),
    path("stream", views.stream, name="stream"),
    path("who", views.who, name="who"),
    # Doors.
    path("door/function", views.function),
    path("door/nothing", views.nothing),
    path("door/async-function", views.async_function),
    path("door/class", views.OnClass.as_view()),
    path("door/async-class", views.OnAsyncClass.as_view()),
    path("door/dispatch", views.OnDispatch.as_view()),
    path("door/async-dispatch", views.OnAsyncDispatch.as_view()),
    path("door/handler", views.OnHandler.as_view()),
    path("door/async-handler", views.OnAsyncHandler.as_view()),
    path("door/decorated-handler", views.OnDecoratedHandler.as_view()),
    path("door/partial", views.part),
    path("door/async-partial", views.async_part),
    path("door/object", views.feed),
    path("door/async-object", views.async_feed),
    path("door/drf-class", views.OnAPIView.as_view()),
    path("door/drf-handler", views.OnAPIHandler.as_view()),
    path("door/drf-above", views.above_api_view),
    path("door/drf-below", views.below_api_view),
    path("door/guarded", views.Guarded.as_view()),
    path("door/ninja/", views.ninja.urls),
    path("admin/", views.admin.urls),
    *i18n_patterns(path("shop/", views.plain, name="shop")),
]
