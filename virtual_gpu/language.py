"""The language of everything that is printed, raised or drawn for a person."""

from __future__ import annotations

import locale
import os

LANGUAGES = ("en", "ko")


def _preferred() -> str:
    """English, unless VIRTUAL_GPU_LANGUAGE or else the locale of the machine asks for Korean."""
    asked = os.environ.get("VIRTUAL_GPU_LANGUAGE", "")
    if asked in LANGUAGES:
        return asked
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):  # what is set first decides, as in gettext
        if os.environ.get(name):
            return "ko" if os.environ[name].lower().startswith("ko") else "en"
    return "ko" if (locale.getlocale()[0] or "").lower().startswith(("ko", "korean")) else "en"


_current = _preferred()


def set_language(code: str) -> None:
    """Switch the language of printed lines, errors and pictures: "en" or "ko"."""
    global _current
    if code not in LANGUAGES:
        raise ValueError(f"{code!r}: 지원하는 언어는 {', '.join(LANGUAGES)}이다 / choose one of these.")
    _current = code


def language() -> str:
    """The language in use: "en" or "ko"."""
    return _current


def tr(ko: str, en: str) -> str:
    """The text in the current language. Both editions stand side by side where they are used."""
    return ko if _current == "ko" else en
