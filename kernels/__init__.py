"""Bytes on the GPU: kernels, their numpy twins, and the reference engine's model."""
