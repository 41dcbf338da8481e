class CounterRouter:
    """The table of Django's database cache lives in the database "ratelimit", and nothing else does."""

    def db_for_read(self, model, **hints):
        return "ratelimit" if model._meta.app_label == "django_cache" else None

    db_for_write = db_for_read

    def allow_migrate(self, db, app_label, **hints):
        return (db == "ratelimit") == (app_label == "django_cache")
