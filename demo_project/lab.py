"""The lab: one card for each way to limit. Every card is a scope of the settings, "lab-" and its name."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.html import escape
from django.utils.safestring import mark_safe
from django.views.decorators.http import require_http_methods, require_safe

from ratelimit_kv import hit, peek

from .views import ANSWERS, shown, span

MOST_TOKENS = 100
PASSWORD = "oracle"
PLANS = {"free": "2/m", "pro": "5/m"}
PERIODS = {10: "In ten seconds", 30: "In thirty seconds", 60: "In a minute", 86400: "Today", 0: "At once"}


# What settings name.


def estimate(request):
    """COST of "lab-tokens": what an answer costs at most, a token a letter."""
    return MOST_TOKENS


def rate_of_plan(request):
    """RATE of "lab-plan". A real one looks the plan up; here the visitor says which."""
    return PLANS.get(chosen(request, "plan"), PLANS["free"])


def denied(request, decision):
    """RESPONSE of every scope here: the page, with the refusal in the card."""
    is_banned = peek(decision.scope, request).reason == "banned"  # the denial itself may have been remembered
    what = "Banned" if is_banned else f"Denied by {decision.scope}"
    text = f"{what}. Try again in {span(decision.retry_after or 1)}."
    return page(request, request.resolver_match.kwargs["name"], text, status=decision.status)


def chosen(request, name):
    """The button that was pressed, also after the redirect."""
    return request.POST.get(name) or request.GET.get(name)


# What happens when a hit has passed: a sentence, or a response.


def passed(request, decision):
    return f"Passed. {decision.remaining} of {decision.limit} left."


def watched(request, decision):
    return "Passed. In earnest this would have been a denial." if decision.reason == "shadow" else "Passed."


def ask_a_model(request, decision):
    answer = random.choice(ANSWERS)
    if request.POST.get("how") == "stream":
        return stream(request, "tokens", write(request, answer))
    request.rate_limit.settle("lab-tokens", len(answer))
    return f"“{answer}” {MOST_TOKENS} tokens reserved, {len(answer)} used."


def write(request, answer):
    used = 0
    try:
        for word in answer.split():
            used += len(word) + 1
            yield f"{escape(word)} "
            time.sleep(0.2)  # the pace of a model that writes, so that a person can watch or leave
    finally:  # also when the visitor has gone
        request.rate_limit.settle("lab-tokens", used)
    yield f"{MOST_TOKENS} tokens reserved, {used} used."


def sign_in(request, decision):
    if request.POST.get("password") == PASSWORD:
        return "Right. The failures before are forgotten."
    return page(request, "password", "Wrong. That one counts.", status=403)


def export(request, decision):
    return stream(request, "concurrent", slowly())


def slowly():
    yield "Row "
    for number in range(1, 21):
        yield f"{number} "
        time.sleep(0.5)  # a slow export: long enough to start others beside it and be refused
    yield "and done."


# The cards.


@dataclass(frozen=True)
class Card:
    title: str
    text: str
    buttons: dict[str, str] = field(default_factory=lambda: {"": "One hit"})
    """Value -> label."""
    name: str = ""
    """Of the buttons, or of the field."""
    label: str = ""
    """Of a field to fill in."""
    hits: int = 1
    target: str = ""
    answer: Callable = passed


CARDS = {
    "fixed": Card("Fixed window", "Three a minute, by the clock: every full minute starts from nothing."),
    "sliding": Card(
        "Sliding window",
        "Three in any minute, about: the minute before still weighs in, so there is no double burst at its end.",
    ),
    "bucket": Card("Bucket", "Three at once, and then a new one every ten seconds."),
    "calendar": Card("Calendar day", "Three a day, and the day starts at midnight in Tokyo, wherever you are."),
    "several": Card(
        "Several rates", "Two in ten seconds and five a minute, asked in one trip. The stricter one decides."
    ),
    "tokens": Card(
        "Reserve, then settle",
        f"A model that costs a token a letter, 200 a minute. {MOST_TOKENS} are reserved before it speaks, "
        "and what it did not use comes back.",
        {"": "Ask", "stream": "Ask, streamed"},
        "how",
        answer=ask_a_model,
    ),
    "password": Card(
        "Only failures count",
        f"Three wrong passwords a minute. The right one is “{PASSWORD}”: it is free, and clears the wrong ones.",
        {"": "Sign in"},
        "password",
        "Password",
        answer=sign_in,
    ),
    "ban": Card("Ban", "Two in ten seconds. One more and you are out for a minute, the next time for two, up to ten."),
    "shadow": Card(
        "Shadow mode", "Two a minute, only on paper: it counts and tells you, and denies nobody.", answer=watched
    ),
    "plan": Card(
        "Plans",
        "Two a minute on the free plan, five on the pro plan. A function says which, and an upgrade helps at once.",
        {"free": "Hit as free", "pro": "Hit as pro"},
        "plan",
    ),
    "ceiling": Card(
        "Ceiling",
        "Two a minute for each device. Devices are easily made up, so an address gets three times that, whatever it says.",
        {"phone": "Phone", "tablet": "Tablet", "watch": "Watch", "fridge": "Fridge"},
        "device",
    ),
    "lease": Card(
        "Lease",
        "Forty a minute for everybody. A process takes four at a time and spends them by itself: "
        "fewer trips to the store, whose number below is a little ahead.",
        {"": "Ten hits"},
        hits=10,
    ),
    "margin": Card(
        "Safety margin", "Five a minute, and the fifth is denied all the same: room for caches that count late."
    ),
    "concurrent": Card(
        "At once",
        "Two exports at a time. One takes ten seconds and opens in a tab of its own: start three.",
        {"": "Start an export"},
        target="_blank",
        answer=export,
    ),
}


@require_safe
def lab(request):
    return HttpResponse(html(request))


@require_http_methods(["GET", "HEAD", "POST"])
def lab_hit(request, name):
    if name not in CARDS:
        raise Http404
    card = CARDS[name]
    choice = request.POST.get(card.name)
    query = {card.name: choice} if choice in card.buttons else None
    back = reverse("lab", query=query, fragment=name)
    if request.method != "POST":
        return redirect(back)
    for _ in range(card.hits):
        decision = hit(f"lab-{name}", request)
        decision.raise_if_denied()
    answer = card.answer(request, decision)
    if isinstance(answer, str):
        messages.success(request, answer, extra_tags=name)
        return redirect(back)
    return answer


def page(request, name, said, status):
    """The page as an answer to a hit that failed."""
    return HttpResponse(html(request, {name: (said, "bad")}), status=status)


def html(request, said=None):
    """The page. ``said``: card -> what it says, and whether that is good; what passed is told after a redirect."""
    said = said or {message.extra_tags: (message.message, "good") for message in messages.get_messages(request)}
    cards = [
        {
            "name": name,
            "card": card,
            "said": said.get(name),
            "limits": limits_of(request, name),
            "settings": settings_of(name),
        }
        for name, card in CARDS.items()
    ]
    return render_to_string("lab.html", {"cards": cards}, request)


def limits_of(request, name):
    """What the visitor has left, one entry for each rate. Looking costs nothing."""
    looks = {"": peek(f"lab-{name}", request)}
    if name == "ceiling":
        device = chosen(request, "device") or "phone"
        own = peek("lab-ceiling", f"field:{device}")
        looks = {f"Your {device}": own, "Your address": peek("lab-ceiling.ceiling", request)}
    return [
        {"label": label or PERIODS.get(rate.window, "Yours"), **shown(of_rate(decision, rate))}
        for label, decision in looks.items()
        for rate in decision.rates
    ]


def of_rate(decision, rate):
    """A decision with the numbers of one of its rates. A ban leaves nothing, and outlasts the window."""
    if decision.reason == "banned":
        return replace(decision, remaining=0)
    return replace(decision, limit=rate.limit, remaining=rate.remaining, reset_after=rate.reset_after)


def settings_of(name):
    """The scope as it stands in the settings, without what all cards share."""
    scope = settings.RATELIMIT_KV["SCOPES"][f"lab-{name}"]
    return "\n".join(f'"{option}": {json.dumps(scope[option])}' for option in scope if option != "RESPONSE")


MARK = mark_safe("<!-- words -->")


def stream(request, name, words):
    """The page, with words that come one by one in a card. What stands below them is made when they have ended."""

    def parts():
        said = {name: (MARK, "good")}
        yield html(request, said).split(MARK)[0]
        yield from words
        yield html(request, said).split(MARK)[1]

    return StreamingHttpResponse(parts())
