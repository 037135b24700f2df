"""A run as a folder of tidy tables: writing, reading and checking it, and the names of its columns.

Folders are written whole or not at all.
"""
