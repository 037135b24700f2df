"""The project's own Triton kernels. Nothing here is imported unless a Triton backend or kernel set is asked for."""
