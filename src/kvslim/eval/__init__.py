"""Evaluation: what a recipe costs in quality, measured through the real cache and the real attention."""
