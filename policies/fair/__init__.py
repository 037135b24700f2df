"""Policies that decide whose turn it is: tenants that share an engine, programs of many calls, predicted lengths.

They batch as `chunked` does and differ in which waiting request starts next.
"""
