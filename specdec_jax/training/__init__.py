"""Training of small targets and of drafts, with optax."""
