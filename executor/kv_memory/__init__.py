"""The paged KV cache as tensors: the pool, its compressed twin, copies to host memory, and block names.

The ledger of `policies` decides who holds a block; this room holds what is in it.
"""
