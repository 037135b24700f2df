"""A planned batch as arrays that a model can run: tokens, positions, block tables and lengths.

`batch_arrays` packs on the host, `device_arrays` keeps them on a device.
"""
