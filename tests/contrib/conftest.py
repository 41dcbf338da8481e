"""docs/integrations.md, run as the recipes are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from tests import test_recipes
from tests.test_recipes import recipe  # noqa: F401  the fixture


@pytest.fixture
def example(recipe: Callable[[str], Client], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Client]:  # noqa: F811
    """``example(title)``: that section is in force; returns a client of its site."""
    document = test_recipes.DOCUMENT.with_name("integrations.md")
    monkeypatch.setattr(test_recipes, "DOCUMENT", document)
    monkeypatch.setattr(test_recipes, "RECIPES", test_recipes.recipes())
    return recipe
