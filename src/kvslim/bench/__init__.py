"""Benchmarks: what a cache costs in time and memory. Every one checks results before it names a speed."""
