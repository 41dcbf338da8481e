"""Live counters in the admin: who is limited now, and a way to let somebody go on.

Only the admin imports this. An ``AdminSite`` of your own registers it with
``site.register(LiveCounter, LiveCounterAdmin)``.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.generic import FormView, TemplateView

from .conf import get_config
from .inspection import Listing, counted_as, duration, fullest, remove, store_facts
from .limiter import aliases
from .models import LiveCounter
from .process import ticks
from .stores import CannotList, StoreError

__all__ = ["LiveCounterAdmin"]

ROWS = 200
"""Counters on the page, the fullest first."""
SECONDS = 5.0
"""After which a page shows what it has found: listing a large cache must not keep a server process busy."""


@admin.register(LiveCounter)
class LiveCounterAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Lists and resets counters. Those who may ``view`` see, those who may ``delete`` reset."""

    def get_urls(self) -> list[URLPattern]:
        def at(route: str, view: type[_Page], name: str) -> URLPattern:
            page = self.admin_site.admin_view(view.as_view(model_admin=self))
            return path(route, page, name=f"{self.opts.app_label}_{self.opts.model_name}_{name}")

        return [at("", CountersPage, "changelist"), at("reset/", ResetPage, "reset")]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@method_decorator(never_cache, name="dispatch")
class _Page(TemplateView):
    """A page of the admin site that ``model_admin`` is registered with."""

    model_admin: LiveCounterAdmin = None  # type: ignore[assignment]
    title = ""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not self.may(request):
            raise PermissionDenied
        request.current_app = self.model_admin.admin_site.name
        return super().dispatch(request, *args, **kwargs)

    def may(self, request: HttpRequest) -> bool:
        """Whether the user may be here."""
        return self.model_admin.has_view_permission(request)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(
            **self.model_admin.admin_site.each_context(self.request),
            title=self.title,
            opts=self.model_admin.opts,
            **kwargs,
        )


# ------------------------------------------------------------------------------------------------------------ the list


class SearchForm(forms.Form):
    """Whose counters to show."""

    scope = forms.ChoiceField(required=False)
    identity = forms.CharField(required=False, max_length=1000)
    over = forms.BooleanField(required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_config()
        names = sorted({*config.families, *config.members})
        self.fields["scope"].choices = [("", "All scopes"), *((name, name) for name in names)]  # type: ignore[attr-defined]
        self.fields["scope"].widget.attrs["aria-label"] = "Scope"
        self.fields["identity"].widget.attrs.update(
            {"aria-label": "Identity", "placeholder": "user:42, ip:203.0.113.9", "size": 30}
        )


class CountersPage(_Page):
    """The fullest counters."""

    template_name = "admin/ratelimit_kv/livecounter/change_list.html"
    title = "Live counters"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        config = get_config()
        form = SearchForm(self.request.GET)
        listing = Listing((), 0, (), True)
        if form.is_valid():
            until = ticks() + SECONDS
            try:
                listing = fullest(
                    config,
                    form.cleaned_data["scope"] or None,
                    form.cleaned_data["identity"] or None,
                    over=form.cleaned_data["over"],
                    limit=ROWS,
                    watch=lambda seen: ticks() < until,
                )
            except ValueError as error:
                form.add_error("identity", str(error))
        return super().get_context_data(
            form=form,
            listing=listing,
            rows=[
                {
                    "counter": row,
                    "window": duration(row.window) if row.window else "at once",
                    "resets_in": duration(row.resets_in),
                    # A scope that is gone has no keys that could be worked out; its counters expire.
                    "value": f"{row.scope} {row.identity}" if counted_as(config, row.scope, row.identity) else "",
                }
                for row in listing.rows
            ],
            stores=[store_facts(alias) for alias in aliases(config)],
            may_reset=self.model_admin.has_delete_permission(self.request),
            seconds=SECONDS,
            **kwargs,
        )


# ---------------------------------------------------------------------------------------------------------- the reset


class ResetForm(forms.Form):
    """Whose counters to remove, once somebody has said that he is sure."""

    counter = forms.Field(
        widget=forms.MultipleHiddenInput, error_messages={"required": "Select the counters to reset first."}
    )
    confirmed = forms.BooleanField(widget=forms.HiddenInput)

    def clean_counter(self) -> list[tuple[str, str]]:
        """Pairs of scope and identity, each once."""
        config = get_config()
        pairs: dict[tuple[str, str], None] = {}
        for text in self.cleaned_data["counter"]:
            scope, _, identity = text.partition(" ")
            try:
                who = counted_as(config, scope, identity)
            except ValueError:
                who = None
            if who is None:
                raise forms.ValidationError("One of these counters is not known here: %(text)s", params={"text": text})
            pairs[scope, who] = None
        return list(pairs)


class ResetPage(FormView, _Page):  # type: ignore[type-arg]
    """Asks first, then removes. Both by POST, both with a CSRF token."""

    template_name = "admin/ratelimit_kv/livecounter/reset_confirmation.html"
    title = "Reset counters"
    form_class = ResetForm
    http_method_names = ["post"]

    def may(self, request: HttpRequest) -> bool:
        return self.model_admin.has_delete_permission(request)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(back=self.get_success_url(), **kwargs)

    def get_success_url(self) -> str:
        """Back to the list, as it was searched."""
        opts = self.model_admin.opts
        url = reverse(
            f"admin:{opts.app_label}_{opts.model_name}_changelist", current_app=self.model_admin.admin_site.name
        )
        return f"{url}?{self.request.GET.urlencode()}".rstrip("?")

    def form_valid(self, form: ResetForm) -> Any:
        removed = 0
        try:
            for scope, identity in form.cleaned_data["counter"]:
                removed += remove(get_config(), scope, identity)
                self.model_admin.log_deletions(self.request, [LiveCounter(key=f"{scope} {identity}")])  # type: ignore[arg-type]
        except (StoreError, CannotList) as error:
            said, level = f"Not all was removed: {error}.", messages.ERROR
        else:
            said, level = f"Removed {removed} counter{'' if removed == 1 else 's'}.", messages.SUCCESS
        self.model_admin.message_user(self.request, said, level)
        return super().form_valid(form)
