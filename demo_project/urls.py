from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.contrib.staticfiles.urls import staticfiles_urlpatterns
from django.urls import path

from . import lab, views

urlpatterns = [
    path("", views.home, name="home"),
    path("ask/", views.ask, name="ask"),
    path("roast/", views.roast, name="roast"),
    path("lab/", lab.lab, name="lab"),
    path("lab/<slug:name>/", lab.lab_hit, name="lab-hit"),
    path("accounts/login/", LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("accounts/logout/", LogoutView.as_view(), name="logout"),
    path("api/ask/", views.api_ask, name="api-ask"),
    path("api/ask/async/", views.api_ask_async, name="api-ask-async"),
    path("api/me/", views.api_me, name="api-me"),
    path("health", views.health, name="health"),
    path("admin/", admin.site.urls),
    *staticfiles_urlpatterns(),  # only with DEBUG
]
