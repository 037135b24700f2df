"""Who holds which KV blocks: the counting ledger, the ledger by block id with its prefix cache, block names, and
swapping. Both ledgers have one interface and are tested against each other.
"""
