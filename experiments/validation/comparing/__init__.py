"""Two runs of the same trace side by side: statistics, batches, bubbles, and the speed of the machine in between.

Each comparison is made from run folders alone.
"""
