"""Clusters as values: presets, links fitted to nccl-tests, order of nodes under leaf switches."""
