"""Scenarios attach as the client's own tests do."""

from tests.client.conftest import attach, engine, shared_daemon

__all__ = ["attach", "engine", "shared_daemon"]
