"""Makes the fixtures of the client's tests available to scenarios."""

from tests.client.conftest import attach, engine, shared_daemon

__all__ = ["attach", "engine", "shared_daemon"]
