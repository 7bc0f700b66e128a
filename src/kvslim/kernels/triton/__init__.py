"""Triton kernels: the packed form read and written on NVIDIA and AMD GPUs from one source."""
