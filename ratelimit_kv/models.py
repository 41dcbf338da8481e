"""What the admin needs to show live counters: a name, and permissions to see and to reset them. There is no table."""

from __future__ import annotations

from typing import Any

from django.db import models

__all__ = ["LiveCounter"]


class _Nothing(models.Manager["LiveCounter"]):
    """Answers without a query, so that whoever walks over all models (dumpdata) finds no counter here, and no error."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class LiveCounter(models.Model):
    """A counter, which lives in a cache. Permissions: ``ratelimit_kv.view_livecounter``, and ``delete`` to reset."""

    key: models.CharField[str, str] = models.CharField(primary_key=True, max_length=200)
    """Scope and identity."""

    objects = _Nothing()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view", "delete")
        verbose_name = "live counter"

    def __str__(self) -> str:
        return str(self.key)
