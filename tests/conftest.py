"""Fixtures that several test files share."""

import signal

from browser import lab, open_notebook  # noqa: F401

import helpers  # noqa: F401  (the course speaks Korean: so do its tests)

# A shell's background job, and all that it starts, ignores Ctrl+C; tests of interrupts must not depend on that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    """What is marked stress runs only where it is asked for: `-m stress`."""
    if "stress" not in config.option.markexpr:
        stress = [item for item in items if item.get_closest_marker("stress")]
        items[:] = [item for item in items if item not in stress]
        config.hook.pytest_deselected(items=stress)
