"""Attention over {sinks, packed blocks, tail, current chunk}, merged by log-sum-exp."""
