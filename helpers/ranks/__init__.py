"""Real processes that train together: how they are started, and the small models that they train."""
