"""Libraries that only some things need."""

from __future__ import annotations

import importlib.util

from .language import tr


def require(*modules: str) -> None:
    """ImportError, with what to install, for the first of these modules that is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                tr(
                    ko=f"{module}이(가) 없다. 'pip install {module}'로 설치한 뒤 커널을 다시 시작한다.",
                    en=f"{module} is missing: 'pip install {module}', then restart the kernel.",
                )
            )
