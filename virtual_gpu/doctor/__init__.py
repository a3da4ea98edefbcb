"""What an out-of-memory message says: its numbers, the traceback around it, the cause that they show, what to try."""

from .answer import Answer, diagnose
from .diagnosis import Diagnosis, Finding
from .message import Message, messages
from .report import text

__all__ = ["Answer", "Diagnosis", "Finding", "Message", "diagnose", "messages", "text"]
