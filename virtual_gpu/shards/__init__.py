"""What each of many ranks holds."""
