"""The arena: every policy with its best knobs on one part of a trace, judged on another, with what chance could do.

It offers `contest` (tune and judge), the page of a verdict, and the command `arena`.
"""
