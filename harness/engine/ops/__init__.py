"""The MoE ops: what every pipeline is made of. `compute` runs on the gpu lane, `host` on the cpu lane, `data` moves."""
