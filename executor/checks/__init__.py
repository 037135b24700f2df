"""Whether kernels compute what they should: self-tests on the device, and compilation without one.

`auto` takes an attention backend only after its self-test.
"""
