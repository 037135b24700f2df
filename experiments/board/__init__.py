"""The fidelity board: every real engine run that the project carries, replayed with the costs that ship, on one page.

`entries` predicts the runs, `ranking` asks whether the simulator names the right winner among policies, `page` writes
Markdown from the same plain data as the JSON, `comparison` holds two boards against each other.
"""
