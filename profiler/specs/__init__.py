"""Facts about models and GPUs: shapes, data types, memory, and the FLOPs and bytes of a batch.

Nothing here is measured; `memory_plan` says how many KV blocks fit.
"""
