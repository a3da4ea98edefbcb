"""A training step of our own: models, optimizers, settings."""
