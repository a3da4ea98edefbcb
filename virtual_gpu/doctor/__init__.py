"""What an out-of-memory message says: its numbers, the traceback around it, the cause that they show, what to try."""

from .diagnosis import Diagnosis, Finding, diagnose
from .message import Message, messages
from .report import text

__all__ = ["Diagnosis", "Finding", "Message", "diagnose", "messages", "text"]
