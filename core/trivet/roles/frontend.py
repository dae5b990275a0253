"""Role ``frontend``: ways in, such as an HTTP server."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.async_engine import AsyncEngine


class Frontend(Role):
    """Runs on the event loop of ``trivet serve`` until cancelled."""

    role: ClassVar[str] = "frontend"

    @abstractmethod
    async def serve(self, engine: AsyncEngine) -> None:
        """Serve requests; returns when the front end ends by itself, is cancelled to stop it."""
