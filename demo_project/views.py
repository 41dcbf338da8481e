"""The oracle: one small site, and most of the ways to limit one."""

import math
import random
import secrets
from datetime import timedelta

from django import forms
from django.contrib.auth.decorators import login_required
from django.http import JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.timesince import timeuntil
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_safe

from ratelimit_kv import peek, rate_limit
from ratelimit_kv.http import phrase

ANSWERS = (
    "Yes, but not on a Friday.",
    "The logs say no. The logs are right.",
    "Ask again after the next deploy.",
    "It works on my machine, and that is all I shall say.",
    "Only if you write the test first.",
    "The cache knows. The cache has forgotten.",
    "Signs point to a missing comma.",
    "It is certain, with probability 0.6.",
)
ROASTS = (
    "Your commit messages read like a hostage's: “fix”, “fix again”, “please”.",
    "You have more browser tabs than users.",
    "Your TODO comments are old enough to vote.",
    "You call it technical debt. Your colleagues call it Tuesday.",
    "You renamed the variable four times and kept the bug.",
    "Your README says “simple”. Your issue tracker disagrees.",
)


class Question(forms.Form):
    question = forms.CharField(
        label="Your question",
        max_length=200,
        widget=forms.TextInput(attrs={"autocomplete": "off", "placeholder": "Will it scale?"}),
    )


def limit_of(scope, request):
    """What the visitor has left of a scope, and when it starts again. Looking costs nothing."""
    return shown(peek(scope, request))


def shown(decision):
    """A decision as ``_limit.html`` shows it."""
    return {"decision": decision, "resets": span(decision.reset_after) if decision.reset_after else None}


def span(seconds):
    """A time to wait, for people."""
    whole = math.ceil(seconds)
    if whole < 120:
        return f"{whole} second{'' if whole == 1 else 's'}"
    now = timezone.now()
    return timeuntil(now + timedelta(seconds=whole), now, depth=1)


@require_safe
def home(request):
    scopes = ("ask", "ask-budget", "roast", "api-ask", "api-ask-async", "api-me", "auth", "global")
    limits = {scope.replace("-", "_"): limit_of(scope, request) for scope in scopes}
    return render(request, "home.html", limits)


@rate_limit("ask", "ask-budget")
@require_http_methods(["GET", "HEAD", "POST"])
def ask(request):
    context = {"form": Question(request.POST or None)}
    if context["form"].is_valid():
        question = context["form"].cleaned_data["question"]
        context = {"form": Question(), "question": question, "answer": random.choice(ANSWERS)}
    limits = [limit_of("ask", request), limit_of("ask-budget", request)]
    return render(request, "ask.html", {**context, "limits": limits})


@rate_limit("roast")
@require_http_methods(["GET", "HEAD", "POST"])
def roast(request):
    line = random.choice(ROASTS) if request.method == "POST" else None
    response = render(request, "roast.html", {"roast": line, "limits": [limit_of("roast", request)]})
    if request.get_signed_cookie("anon", None) is None:
        response.set_signed_cookie(
            "anon", secrets.token_urlsafe(12), max_age=timedelta(days=365), httponly=True, samesite="Lax"
        )
    return response


def roasted_enough(request, decision):
    """The RESPONSE of the scope "roast": the page itself, with a kind word in place of the button."""
    limits = [limit_of("roast", request)]
    return render(request, "roast.html", {"enough": True, "limits": limits}, status=429)


def refused_in_json(request, decision):
    """The RESPONSE of the endpoints: JSON also for a client that says nothing of what it takes, as curl does."""
    wait = math.ceil(decision.retry_after or 1)
    problem = {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too many requests",
        "status": decision.status,
        "detail": f"The oracle rests. Ask again in {phrase(wait)}.",
        "violated-policies": [decision.scope],
        "retry_after": wait,
    }
    return JsonResponse(problem, status=decision.status, content_type="application/problem+json")


def oracle(request, scope):
    question = request.GET.get("question") or request.POST.get("question", "")
    answer = random.choice(ANSWERS)
    return JsonResponse({"question": question, "answer": answer, "remaining": remaining(request, scope)})


def remaining(request, scope):
    """What this request has left of the scope; None when the store did not answer."""
    return next((one.remaining for one in request.rate_limit.decisions if one.scope == scope), None)


@rate_limit("api-ask")
@csrf_exempt
@require_http_methods(["GET", "HEAD", "POST"])
def api_ask(request):
    return oracle(request, "api-ask")


@rate_limit("api-ask-async")
@csrf_exempt
@require_http_methods(["GET", "HEAD", "POST"])
async def api_ask_async(request):
    return oracle(request, "api-ask-async")


@rate_limit("api-me")
@login_required
def api_me(request):
    user = request.user.get_username()
    return JsonResponse({"user": user, "remaining": remaining(request, "api-me")})


def health(request):
    return JsonResponse({"status": "ok"})
