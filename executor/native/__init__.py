"""CPU kernels in C++, built on first use by the machine's own compiler; everything they do has a plain PyTorch twin."""
