"""CPU kernels: attention, linear layers, fused layers and sampling, compiled to machine code. README.md says how."""
