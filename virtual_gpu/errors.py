"""What can go wrong, by name: everything that this package raises on purpose is a `VirtualGPUError`.

Those that speak of a value are ValueErrors too, so that whoever catches those catches them.
"""

from __future__ import annotations


class VirtualGPUError(Exception):
    """The root of all of them."""


class WrongValue(VirtualGPUError, ValueError):
    """A value that is not what it must be: its text says which one, and what would do."""


class UnknownName(WrongValue):
    """A name that is not among the known ones: its text names the nearest, and lists all or says where they are.

    said and choices: the text and the list in two parts, for whom so long a list is in the way. where: what the text
    says in the place of the list.
    """

    def __init__(self, said: str, choices: str = "", where: str = ""):
        super().__init__(f"{said} {where or choices}".rstrip())
        self.said, self.choices = said, choices


class BadConfiguration(WrongValue):
    """A model's configuration that cannot be read, or that describes no model that can be built."""


class NotSupported(WrongValue):
    """Known, and not simulated: its text says why."""


class OldLibrary(WrongValue):
    """What was asked for wants a newer library: its text says which, and how to install it."""


class NoSuchLayer(WrongValue):
    """No layer of the model has the name that an adapter should go to."""


class ExistingFile(VirtualGPUError, OSError):
    """A file that would have been overwritten, or a folder that cannot be written to."""
