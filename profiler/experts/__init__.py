"""Layers of experts and latent attention: how tokens spread over experts, what their kernels cost on a card, and what
devices send each other because of them.
"""
