"""The interactive panels, one module each; what they share is in `panel`."""
