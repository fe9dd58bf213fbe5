"""A trained model opened from its checkpoint for forward passes only."""
