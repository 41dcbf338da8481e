import sys
from pathlib import Path

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand

WHAT_TO_TRY = """
  Look      {url}/         every limit, with your own numbers
            {url}/admin/   sign in as demo, password demo
  Script    for i in $(seq 21); do curl -s -o /dev/null -w '%{{http_code}} ' {url}/api/ask/; done
            twenty times 200, then 429
  Watch     {python} manage.py ratelimit_inspect
            in another terminal{there}: the same counters

  Counters are kept in {counters}.
"""


class Command(BaseCommand):
    help = "Makes the tables and the user demo (password demo), says what to try, and serves the demo."

    def add_arguments(self, parser):
        parser.add_argument("addrport", nargs="?", default="127.0.0.1:8000", help="port, or address:port")
        parser.add_argument("--no-serve", action="store_true", help="Only prepare; start no server.")

    def handle(self, *, addrport, no_serve, **options):
        call_command("migrate", verbosity=0, interactive=False)
        call_command("createcachetable", database="ratelimit", verbosity=0)
        self.make_user()
        address = addrport if ":" in addrport else f"127.0.0.1:{addrport}"
        # As it has to be typed where no virtual environment is active.
        python = Path(sys.executable)
        words = {
            "url": f"http://{address}",
            "python": python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python,
            "there": " with the same REDIS_URL" if settings.REDIS_URL else "",
            "counters": "Redis" if settings.REDIS_URL else settings.DATABASES["ratelimit"]["NAME"],
        }
        self.stdout.write(self.style.SUCCESS("\nThe oracle is ready."))
        self.stdout.write(WHAT_TO_TRY.format(**words))
        self.stdout.flush()
        if not no_serve:
            call_command("runserver", address, use_reloader=False)

    def make_user(self):
        user, created = get_user_model().objects.get_or_create(
            username="demo", defaults={"is_staff": True, "is_superuser": True}
        )
        if created:
            user.set_password("demo")
            user.save()
