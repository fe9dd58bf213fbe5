"""Helpers for distributed tests on CPU, shipped so that users can test their own code."""
