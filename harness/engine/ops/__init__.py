"""The MoE ops are what every pipeline is made of. Those of `compute` run on the gpu lane, those of `host` on the cpu
lane, and those of `data` move bytes."""
