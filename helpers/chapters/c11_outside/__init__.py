"""Chapter 11: out of memory outside the training step: evaluating, generating, saving, resuming, loading."""
