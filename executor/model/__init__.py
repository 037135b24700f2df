"""Models that run mixed batches: layers, weights from files or random, samplers, tokenizers, and CUDA graphs.

`load_model` is the door.
"""
