"""Helpers without knowledge of models: files, help texts, progress. No torch."""
