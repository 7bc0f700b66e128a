"""CPU kernels: C++ behind a plain C interface (kvslim/native), loaded with ctypes."""
