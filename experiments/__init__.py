"""Whatever joins two worlds: parity, fidelity, validation, calibration, sweeps, capacity, and the papers' figures.

Each study is a room with a command of its own; `running` carries their tasks.
"""
