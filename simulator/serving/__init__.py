"""The simulator behind the HTTP door: its virtual clock bound to real time, predicted costs in place of a device.

`real_time.py` plays the cluster's events when they are due; `served.py` opens the door and writes the run folder.
"""
