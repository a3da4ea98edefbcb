"""A starting point: somebody's configuration, what it needs on a GPU, and which of its lines to change."""

from .answer import Answer, start_from

__all__ = ["Answer", "start_from"]
